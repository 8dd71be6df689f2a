"""Where events become records and requests for passes."""
