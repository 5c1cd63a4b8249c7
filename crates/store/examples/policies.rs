//! Cache policies on generated routing traces: the table of the design note on cache policies.
//!
//! ```text
//! cargo run --release -p forebay-store --example policies [-- TOKENS]
//! ```
//! Percent of hits. "best" knows the future (Belady 1966) and is out of reach for any policy.
//! "us/pass" is the time that the bookkeeping of the default policy takes for one pass; the second table
//! shows how it grows with the number of slots.

use std::collections::BTreeSet;
use std::time::Instant;

use forebay_store::traces::{Routing, fitted};
use forebay_store::{Policy, replay};

fn main() {
    let tokens = std::env::args().nth(1).map_or(1500, |n| n.parse().expect("a number of tokens"));
    print!("{:<22}{:>12}", "trace", "slots/layer");
    Policy::ALL.iter().for_each(|policy| print!("{:>12}", policy.name()));
    println!("{:>8}{:>9}", "best", "us/pass");
    let mut rows: Vec<(String, Routing)> =
        fitted().into_iter().map(|(name, routing, _)| (name.into(), routing)).collect();
    // The published rates do not say how much layers differ either.
    rows.push(("qwen3-30b uneven".into(), Routing { spread: 0.9, ..rows[4].1 }));
    for (name, routing) in rows {
        let trace: Vec<(usize, Vec<u16>)> = routing.trace(tokens, 11).collect();
        for per_layer in [4, 8, 16, 32, 64] {
            print!("{name:<22}{per_layer:>12}");
            let slots = per_layer * routing.layers;
            let mut pass_us = 0.0;
            for policy in Policy::ALL {
                let clock = Instant::now();
                print!("{:>12.1}", hits(&trace, routing, policy, slots));
                if policy == Policy::default() {
                    pass_us = clock.elapsed().as_secs_f64() * 1e6 / trace.len() as f64;
                }
            }
            println!("{:>8.1}{pass_us:>9.1}", best(&trace, routing, slots));
        }
    }
    cost(tokens);
}

fn cost(tokens: usize) {
    println!("\n{:<22}{:>12}{:>12}{:>9}", "60 x 512 experts", "slots", "hits", "us/pass");
    let routing = Routing { layers: 60, experts: 512, ..fitted()[4].1 };
    let trace: Vec<(usize, Vec<u16>)> = routing.trace(tokens, 11).collect();
    for policy in Policy::ALL {
        for slots in [250, 1000, 5000, 20_000] {
            let clock = Instant::now();
            let hits = hits(&trace, routing, policy, slots);
            let pass_us = clock.elapsed().as_secs_f64() * 1e6 / trace.len() as f64;
            println!("{:<22}{slots:>12}{hits:>12.1}{pass_us:>9.1}", policy.name());
        }
    }
}

fn hits(trace: &[(usize, Vec<u16>)], routing: Routing, policy: Policy, slots: usize) -> f64 {
    let passes = trace.iter().map(|(layer, experts)| (*layer, experts.as_slice()));
    let found = replay(&vec![routing.experts; routing.layers], passes, policy, slots);
    let found = found.expect("a generated trace is a good one");
    let (hits, misses) = found.iter().fold((0, 0), |sum, l| (sum.0 + l.hits, sum.1 + l.misses));
    100.0 * hits as f64 / (hits + misses) as f64
}

/// Evicts what is used again last.
fn best(trace: &[(usize, Vec<u16>)], routing: Routing, slots: usize) -> f64 {
    let all = routing.layers * routing.experts;
    let uses = trace.iter().flat_map(|(layer, experts)| {
        experts.iter().map(move |&e| layer * routing.experts + e as usize)
    });
    let uses: Vec<usize> = uses.collect();
    let mut next = vec![usize::MAX; uses.len()];
    let mut upcoming = vec![usize::MAX; all];
    for (at, &expert) in uses.iter().enumerate().rev() {
        next[at] = std::mem::replace(&mut upcoming[expert], at);
    }
    let mut inside = vec![None; all];
    let mut order = BTreeSet::new();
    let mut hits = 0;
    for (at, &expert) in uses.iter().enumerate() {
        if let Some(when) = inside[expert] {
            hits += 1;
            order.remove(&(when, expert));
        } else if order.len() == slots {
            let (_, victim) = order.pop_last().expect("there are slots");
            inside[victim] = None;
        }
        inside[expert] = Some(next[at]);
        order.insert((next[at], expert));
    }
    100.0 * hits as f64 / uses.len() as f64
}
