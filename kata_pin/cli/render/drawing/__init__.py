"""The node drawn: what each pCPU is, where its box goes; and as characters, SVG and HTML."""
