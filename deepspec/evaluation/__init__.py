"""What speculative decoding is worth: tasks, statistics over rounds, the table and the page that show them."""
