//! One module per command.

pub mod bench;
pub mod golden;
pub mod inspect;
pub mod perplexity;
pub mod plan;
pub mod pull;
pub mod run;
pub mod same;
pub mod selftest;
pub mod template;
pub mod tokenize;
pub mod trace;
