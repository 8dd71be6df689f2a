"""Starts the broker: `python3 -IS kata_pin/rights/broker <number of a connected socket>`.

Isolated Python knows neither this package nor others; standard modules come first on its path.
"""

import os
import sys

sys.path.append(os.path.abspath(__file__).rsplit("/", 4)[0])

from kata_pin.rights.broker.operations import main

main(int(sys.argv[1]))
