"""The tables and figures of the paper as data, and what runs them."""
