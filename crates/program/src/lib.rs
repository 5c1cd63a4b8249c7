//! Lowering of a [`forebay_models::ModelSpec`] to a flat program, and the memory ledger.
//!
//! Reading order: [`op`] (the operations), [`mod@lower`] (spec to program), [`scratch`] (which buffers may
//! share memory), [`tap`] (named points), [`ledger`] (what a process needs, line by line),
//! [`profile`] (where the time goes), [`backend`] (what runs it).
//!
//! A program is cut into segments at the router read-backs: after each segment the engine knows which
//! experts the rows chose, and asks the store for them. What is not here: how an operation is computed
//! (backends), when segments run (`forebay-engine`).

#![forbid(unsafe_code)]

pub mod backend;
pub mod ledger;
pub mod lower;
pub mod op;
pub mod profile;
pub mod scratch;
pub mod tap;

pub use backend::{
    Backend, BackendError, ExpertMatrices, LOGIT_LINE, LogitLines, Pass, PickLine, Routing,
    SequenceTables, WholePass,
};
pub use ledger::{Ledger, LedgerItem};
pub use lower::{Extras, lower, lower_with};
pub use op::*;
pub use profile::{Profile, ProfileRow, Work};
pub use tap::{Point, Tap, TapSet};
