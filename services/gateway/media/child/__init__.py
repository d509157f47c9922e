"""What runs in a media process. The only rooms of the gateway with numpy, Pillow and PyAV.

__main__  one item after the other, each within its limits
make      an item: bytes in, a blob written
images    image files to pixels
videos    video files to chosen frames
patches   pixels to patches, in the order in which the encoder takes them
headers   what a file says of its size, before anything is decoded
bad       what is wrong with an item, as its sender is told
"""
