"""The console command ``lightning-memprec``: one module per subcommand."""
