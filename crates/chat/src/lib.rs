//! Answers as models write them, taken apart while they come: reasoning, content, tool calls.
//!
//! Reading order: [`Format`] (the languages that models speak, and which one a template speaks), [`Parser`]
//! (pieces of text in, [`Delta`]s out), [`Answer`] (token ids in). Two machines do the work: `tagged` for
//! formats that put tags around reasoning and calls, `harmony` for the one that is made of messages.
//!
//! What is certain goes out at once; only a tail that may still become a marker is held back. A call goes out
//! whole, when its last character is there: until then nobody can know whether it is one, and a call that is cut
//! off or wrong has to turn back into text. Nothing that a model writes is an error.
//!
//! Not here: prompts and templates (`forebay-text`), what makes a model write a call (grammars), HTTP.
#![forbid(unsafe_code)]

mod answer;
mod calls;
mod format;
mod harmony;
mod parser;
mod sink;
mod tagged;

pub use answer::Answer;
pub use calls::{Call, Tool};
pub use format::Format;
pub use parser::{End, Parsed, Parser};
pub use sink::Delta;
