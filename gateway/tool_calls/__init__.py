"""How models write calls of tools and their reasoning: read as it comes, and forced where a call is wanted."""
