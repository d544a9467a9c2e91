"""Host-side accounts of pages and lanes: integers only."""
