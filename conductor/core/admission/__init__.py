"""Who is refused before it begins."""
