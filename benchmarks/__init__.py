"""Programs that measure the library. They use it as anyone would; nothing in it imports them."""
