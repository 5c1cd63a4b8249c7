//! Model families. A family reads a catalog and its config, and returns a [`ModelSpec`]: data, no code.
//!
//! What is here: the closed vocabulary of mechanisms ([`spec`]), name tables and config dialects. What
//! is not here: how a mechanism is computed (`forebay-program` lowers it, backends run it).

pub mod spec;

pub use spec::*;
