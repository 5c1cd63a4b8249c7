//! Lowering of a model to a flat program, and its memory ledger. (being written)
