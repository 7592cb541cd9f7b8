"""A prefill group: computes prompts chunk by chunk and hands their KV over to decode nodes while it computes."""
