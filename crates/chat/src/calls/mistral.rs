//! `[TOOL_CALLS]` and then a JSON array of calls, or `NAME[CALL_ID]id[ARGS]{…}`.

use super::{Attempt, Call, Site, json};
use crate::parser::End;

const OPENER: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";
const MAX_NAME_BYTES: usize = 256;

/// Calls that begin with `[TOOL_CALLS]`.
pub(crate) fn tagged(site: Site<'_>) -> Attempt {
    let start = site.skip_blanks(OPENER.len());
    match site.text.as_bytes().get(start) {
        None => site.unfinished(),
        Some(b'[') => array(site, start),
        Some(b'{') => {
            let body = &site.text[start..];
            match json::extent(body) {
                json::Extent::Open => site.unfinished(),
                json::Extent::Broken => Attempt::No,
                json::Extent::Bytes(n) => match json::call(&body[..n]) {
                    Some(call) => Attempt::Done(start + n, vec![call]),
                    None => Attempt::No,
                },
            }
        }
        Some(_) => named(site, start),
    }
}

fn array(site: Site<'_>, start: usize) -> Attempt {
    let mut at = start + 1;
    let mut calls = Vec::new();
    // Calls of a list that is cut off stand, as far as they are whole.
    let unfinished = |calls: Vec<Call>| match site.end {
        Some(End::Length) if !calls.is_empty() => Attempt::Done(site.text.len(), calls),
        _ => site.unfinished(),
    };
    loop {
        at = site.skip_blanks(at);
        match site.text.as_bytes().get(at) {
            None => return unfinished(calls),
            Some(b']') => return Attempt::Done(at + 1, calls),
            Some(b',') if !calls.is_empty() => at += 1,
            Some(b'{') => match json::extent(&site.text[at..]) {
                json::Extent::Open => return unfinished(calls),
                json::Extent::Broken => return Attempt::No,
                json::Extent::Bytes(n) => {
                    let Some(call) = json::call(&site.text[at..at + n]) else { return Attempt::No };
                    calls.push(call);
                    at += n;
                }
            },
            Some(_) => return Attempt::No,
        }
    }
}

fn named(site: Site<'_>, start: usize) -> Attempt {
    let rest = &site.text[start..];
    let Some(name_end) = rest.find(['[', '{', '\n']) else {
        return if rest.len() > MAX_NAME_BYTES { Attempt::No } else { site.unfinished() };
    };
    let name = rest[..name_end].trim();
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return Attempt::No;
    }
    let mut at = start + name_end;
    match site.has(at, CALL_ID) {
        None => return Attempt::Incomplete,
        Some(true) => {
            let id = at + CALL_ID.len();
            let Some(n) = site.text[id..].find(['[', '{']) else { return site.unfinished() };
            at = id + n;
        }
        Some(false) => {}
    }
    match site.has(at, ARGS) {
        None => return Attempt::Incomplete,
        Some(true) => at = site.skip_blanks(at + ARGS.len()),
        Some(false) => {}
    }
    let body = &site.text[at..];
    match body.as_bytes().first() {
        None => site.unfinished(),
        Some(b'{') => match json::extent(body) {
            json::Extent::Open => site.unfinished(),
            json::Extent::Broken => Attempt::No,
            json::Extent::Bytes(n) => match json::object(&body[..n]) {
                Some(arguments) => {
                    Attempt::Done(at + n, vec![Call { name: name.to_owned(), arguments }])
                }
                None => Attempt::No,
            },
        },
        Some(_) => Attempt::No,
    }
}
