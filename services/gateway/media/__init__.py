"""Images and videos: from bytes to a blob of patches that the encoder takes. Knows no model by name.

    bytes ──prepare──▶ is it cached or being made? ──processes──▶ child: decode, resize, patches ──▶ blob ──store──▶ pin

The gateway's own process touches neither pixels nor patches: a child decodes, and writes the blob itself.

prepare    one item for one request: cached, made once, pinned
processes  child processes with limits; a crash costs one request
child      what runs in them; the only rooms with numpy, Pillow and PyAV
frames     what gateway and media process say to each other
store      blobs in a folder, pinned while they are needed
sizes      how large an image becomes, and which frames of a video are taken
wire       the head of a blob
items      plain data that passes between these
"""
