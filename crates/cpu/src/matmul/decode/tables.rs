//! Nibbles that are looked up: `IQ4_NL`, `IQ4_XS`, MXFP4 in both layouts.

use forebay_quant::group::{E2M1_CODES, IQ4_CODES, iq4_xs_scales};
use forebay_quant::{ActOrder, CodeFacts, Format};

use super::{Decoded, Decoder, bytes, facts, half, halves, look_up, split_nibbles, words};
use crate::matmul::isa::{Isa, RowPtrs};

pub(in crate::matmul) struct Iq4Nl;

impl<I: Isa> Decoder<I> for Iq4Nl {
    const FACTS: CodeFacts = facts(Format::Iq4Nl);
    const ORDER: ActOrder = Format::Iq4Nl.act_order();
    const PREFETCH: [usize; 3] = Format::Iq4Nl.group_bytes();
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 18 bytes, 144 in all.
        unsafe {
            let ws = halves::<I>(p, 0, 18);
            let codes = look_up::<I>(&IQ4_CODES, split_nibbles::<I>(words::<I>(p, 2, 18)));
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(in crate::matmul) struct Iq4Xs;

impl<I: Isa> Decoder<I> for Iq4Xs {
    const FACTS: CodeFacts = facts(Format::Iq4Xs);
    const ORDER: ActOrder = Format::Iq4Xs.act_order();
    const PREFETCH: [usize; 3] = Format::Iq4Xs.group_bytes();
    const TAIL: bool = false;
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: one super-block of 136 bytes.
        unsafe {
            let first = iq4_xs_scales(&bytes(p[0], 2));
            let second = if I::ROWS == 2 { iq4_xs_scales(&bytes(p[1], 2)) } else { 0 };
            let ws = I::mul(half::<I>(p, 0), I::i8([first, second]));
            let codes = p.map(|row| row.wrapping_add(8));
            let codes = look_up::<I>(&IQ4_CODES, split_nibbles::<I>(I::load_packed(codes)));
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(in crate::matmul) struct Mxfp4;

impl<I: Isa> Decoder<I> for Mxfp4 {
    const FACTS: CodeFacts = facts(Format::Mxfp4);
    const ORDER: ActOrder = Format::Mxfp4.act_order();
    const PREFETCH: [usize; 3] = Format::Mxfp4.group_bytes();
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 17 bytes, 136 in all.
        unsafe {
            let ws = I::e8m0_half::<17>(p, 0);
            let codes = look_up::<I>(&E2M1_CODES, split_nibbles::<I>(words::<I>(p, 1, 17)));
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(in crate::matmul) struct Mxfp4Split;

impl<I: Isa> Decoder<I> for Mxfp4Split {
    const FACTS: CodeFacts = facts(Format::Mxfp4Split);
    const ORDER: ActOrder = Format::Mxfp4Split.act_order();
    const PREFETCH: [usize; 3] = Format::Mxfp4Split.group_bytes();
    #[inline(always)]
    unsafe fn decode(&self, [p, s, _]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: 128 bytes of codes, 8 of scales.
        unsafe {
            let ws = I::e8m0_half::<1>(s, 0);
            let codes = look_up::<I>(&E2M1_CODES, split_nibbles::<I>(I::load_packed(p)));
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}
