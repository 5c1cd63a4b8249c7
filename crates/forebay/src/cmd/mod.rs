//! One module per command.

pub mod batch;
pub mod bench;
pub mod chat;
pub mod golden;
pub mod inspect;
pub mod parse;
pub mod perplexity;
pub mod plan;
pub mod pull;
pub mod run;
pub mod same;
pub mod selftest;
pub mod serve;
pub mod template;
pub mod tokenize;
pub mod trace;
