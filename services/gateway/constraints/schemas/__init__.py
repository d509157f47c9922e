"""JSON schemas: read into plain data, merged to what each value must be, and written in a normal form.

The library that makes grammars ignores some of a schema, misreads some, and crashes on some. So it gets
no client's schema, only this form of it: types, bounds, `properties` with a pattern for all other names,
`prefixItems`, `anyOf`, and references to definitions; no `allOf` of objects, no unknown keyword, no loop.

    text ──▶ Document (nodes by pointer) ──▶ states (nodes that hold of one value) ──▶ normal form

normal     the way through: a client's schema in, text for the library out
writing    states as the normal form
states     which nodes hold together, which values exist at all, and which would never end
merging    several nodes that hold of one value, as one
document   the nodes of a schema, by pointer; what a `$ref` points to
keywords   one node: its keywords checked, and as plain data
patterns   expressions as JSON schema has them, translated
names      expressions for all names but some
node       plain data: a node, its bounds, its parts
"""
