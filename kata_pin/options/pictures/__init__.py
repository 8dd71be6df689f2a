"""The node drawn: what each pCPU is, where its box goes; as characters, SVG and HTML.

a state document -> picture (boxes on a grid) -> command (terminal), svg, page, proof
"""
