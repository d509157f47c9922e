"""The largest of each row: reference; native in C++."""
