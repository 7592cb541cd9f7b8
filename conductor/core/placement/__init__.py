"""Where a request goes: the estimates for every instance, and the policies that choose."""
