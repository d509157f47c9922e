"""Images and videos: from bytes to a blob of patches that the encoder takes. Knows no model by name.

    bytes ──prepare──▶ is it cached or being made? ──processes──▶ child: decode, resize, patches ──▶ blob ──store──▶ pin

The gateway's own process touches neither pixels nor patches: a child decodes, and writes the blob itself.

building   all of it, from the knobs
door       the items of a request: read, made and pinned, all at once
options    what a request asks of its media
sources    where bytes come from: URLs, a folder, uploads, names
fetch      http and https, without a way into the operator's own network
addresses  which hosts and addresses are public
uploads    files that clients sent before, by hash and by name
faults     what can be wrong, in one word each
prepare    one item for one request: cached, made once, pinned
processes  child processes with limits; a crash costs one request
child      what runs in them; the only rooms with numpy, Pillow and PyAV
frames     what gateway and media process say to each other
store      blobs in a folder, pinned while they are needed
sizes      how large an image becomes, and which frames of a video are taken
wire       the head of a blob
items      plain data that passes between these
"""
