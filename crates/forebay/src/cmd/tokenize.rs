//! `tokenize`: text to ids and back.

use std::process::ExitCode;

use forebay_files::Catalog;
use forebay_text::{Markers, Specials, Tokenizer, TokenizerOptions};
use serde_json::json;

use crate::args::TokenizeArgs;
use crate::failure::usage;
use crate::model::{self, Found};
use crate::term::say;

pub fn run(args: TokenizeArgs) -> anyhow::Result<ExitCode> {
    let path = match model::find(&args.model)? {
        Found::Here(path) => path,
        Found::OnHub(wanted) => return Err(wanted.refusal("`forebay pull` fetches it")),
    };
    let catalog = Catalog::open(&path)?;
    let tokenizer = Tokenizer::from_catalog(&catalog, TokenizerOptions::default())?;
    if args.decode {
        let ids = model::parse_ids(&args.text)
            .ok_or_else(|| usage(format!("{:?} is no list of token ids", args.text)))?;
        if let Some(id) = ids.iter().find(|id| tokenizer.token_name(**id).is_none()) {
            let size = tokenizer.vocab_size();
            return Err(usage(format!("there is no token {id}: the vocabulary has {size}")));
        }
        let text = tokenizer.decode(&ids, Markers::Keep);
        match args.json {
            true => say!("{}", json!({ "text": text }))?,
            false => say!("{text}")?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let specials = if args.special { Specials::Parse } else { Specials::Ignore };
    let ids = tokenizer.encode(&args.text, specials)?;
    let pieces: Vec<String> =
        ids.iter().map(|id| tokenizer.decode(&[*id], Markers::Keep)).collect();
    match args.json {
        true => say!("{}", json!({ "ids": ids, "pieces": pieces }))?,
        false => {
            for (id, piece) in ids.iter().zip(pieces) {
                say!("{id:>8}  {piece:?}")?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
