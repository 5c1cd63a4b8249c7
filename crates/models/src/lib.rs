//! Model families. A family reads a catalog and its config, and returns a [`ModelSpec`]: data, no code.
//!
//! Reading order: [`spec`] (the closed vocabulary of mechanisms), [`families`] (one file each), [`dflash`] (drafters
//! of blocks), [`config`]
//! and [`weights`] (dialects of description and of names), [`rope`].
//!
//! What is not here: how a mechanism is computed (`forebay-program` lowers it, backends run it).

#![forbid(unsafe_code)]

pub mod config;
pub mod dflash;
pub mod error;
pub mod families;
pub mod rope;
pub mod spec;
pub mod weights;

pub use dflash::BlockDrafter;
pub use error::ModelError;
pub use families::{read, read_with, refuse_others};
pub use spec::*;
