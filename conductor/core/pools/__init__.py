"""How loaded the prefill and the decode pool are, and who moves between them."""
