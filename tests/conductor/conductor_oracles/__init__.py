"""What `conductor._native` is held to: the same with numpy, column by column, and with a dict."""
