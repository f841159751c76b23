"""A CUDA device that computes on the CPU, for a torch that was built without CUDA: the lines for a GPU run in
these tests.

`native/` is the device (torch's own dispatch, allocator, streams and process groups), `emulation.py` what
`torch.cuda` shows of it, `build.py` compiles it once per version of torch, and `environment.py` puts it into
the processes of a command.
"""
