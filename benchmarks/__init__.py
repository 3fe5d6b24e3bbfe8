"""Programs that benchmark the library. They import it as user code does; the library never imports them."""
