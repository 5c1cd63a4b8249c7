//! Models from a Hugging Face hub: what a repository holds, which of its files make one model,
//! downloads that end byte-exact or not at all, and the cache that other tools share.
//!
//! A download is named by its digest from the first byte on: `blobs/<digest>.incomplete` can be
//! resumed by anyone, and becomes `blobs/<digest>` only after the digest of its content is that name.
//! Nothing that a server says is trusted further than that: paths are checked before they are joined,
//! lengths before they are believed, and no failure is retried without end.
//!
//! Not here: containers (`forebay-files`), questions and progress bars (`forebay`).

#![forbid(unsafe_code)]

mod config;
mod digest;
mod error;
mod id;

mod http;
mod listing;
mod select;

mod cache;
mod download;
mod fetch;

mod remote;

pub use cache::{Cache, CachedModel};
pub use config::{HubConfig, Retry};
pub use digest::Digest;
pub use error::{HubError, Missing};
pub use fetch::{Control, Hub};
pub use id::RepoId;
pub use listing::{Listing, RepoFile};
pub use remote::{RemoteFile, RemoteModel};
pub use select::{Container, Selection, Skipped, select};
