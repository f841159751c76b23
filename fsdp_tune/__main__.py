from fsdp_tune.cli.app import main

if __name__ == "__main__":
    main()
