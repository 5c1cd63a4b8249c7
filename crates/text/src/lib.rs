//! Text on both sides of the model: tokenizers, chat templates, the streaming detokenizer and stop strings.
//!
//! A request becomes text through [`ChatTemplate`], the text becomes ids through [`Tokenizer`], and
//! [`render_prompt`] does both such that nothing a user wrote can turn into a control token. On the way back,
//! [`StreamDecoder`] turns ids into whole characters and [`StopMatcher`] cuts at stop strings.
//!
//! Not here: parsers for tool calls and reasoning, and sampling.
#![forbid(unsafe_code)]

mod error;
mod tokenizer;

mod stop;
mod stream;

mod prompt;
mod template;

pub use error::{Result, TextError};
pub use prompt::{Piece, Prompt, render_prompt};
pub use stop::{StopMatcher, Stopped};
pub use stream::StreamDecoder;
pub use template::{ChatRequest, ChatTemplate};
pub use tokenizer::{
    Markers, MemoryEstimate, Specials, Tokenizer, TokenizerFiles, TokenizerOptions,
};
