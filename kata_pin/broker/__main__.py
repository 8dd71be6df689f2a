"""Starts the broker: `python3 -IS kata_pin/broker <number of a connected socket>`.

Isolated Python knows neither this package nor others; standard modules come first on its path.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from kata_pin.broker.main import main

main(int(sys.argv[1]))
