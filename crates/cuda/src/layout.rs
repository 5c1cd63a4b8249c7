//! How weights lie in device memory, and their way there from the published bytes.
//!
//! Formats of files put scales between codes, so that nothing is aligned; on a GPU every load would straddle. So a matrix
//! is taken apart when it is loaded: codes, high bits, scales and super-block scales are planes of their own. Three widths of
//! codes and nine kinds of scales serve all formats; sums do not change, since a code and a scale mean what they meant.
//! Codes of 2 and 3 bits become 4 bits wide, 5 become 6, and grid points are stored as the 16 codes that they stand for:
//! some formats take more memory here than in the file ([`Layout::bytes`] says how much).
//!
//! Not here: who reads the files ([`crate::load`]), what kernels do with the planes (`kernels/matrix.cuh`).

use std::ops::Range;

use forebay_quant::format::ParamType;
use forebay_quant::grid::{self, GridFormat};
use forebay_quant::group::{
    BLOCK, E2M1_CODES, GROUP, Group, IQ4_CODES, LANES, iq4_xs_scales, q3_k_scales, q4_k_scales,
};
use forebay_quant::{Format, MatrixView, decode_group};

/// Bits of a stored code; the numbers are those of `enum Width`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    F32,
    F16,
    Bf16,
    Four,
    FourTable,
    Six,
    Eight,
}

/// How scales are stored; the numbers are those of `enum Kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    None,
    E8m0,
    F16,
    F16Bias,
    Bf16Bias,
    F32Bias,
    Super,
    SuperHalves,
    SuperBias,
    SuperBiasHalves,
}

/// The device layout of a format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Layout {
    pub width: Width,
    pub kind: Kind,
    /// Blocks that share a scale, as a power of two.
    pub shift: u32,
    /// Added to stored codes.
    pub plus: i32,
    /// Factor on super-block scales.
    pub unit: f32,
    /// Signed codes of [`Width::FourTable`].
    pub table: [i8; 16],
}

/// Planes of a matrix in memory: codes, high bits, scales, super-block scales.
pub(crate) const PLANES: usize = 4;

impl Layout {
    /// The layout of a format; none: it has no kernels.
    pub(crate) fn of(format: Format) -> Option<Layout> {
        let plain =
            |width, kind, plus| Layout { width, kind, shift: 0, plus, unit: 1.0, table: [0; 16] };
        let table = |kind, codes: &[u8; 16], offset: i32, unit| Layout {
            width: Width::FourTable,
            kind,
            shift: 0,
            plus: 0,
            unit,
            table: codes.map(|c| (c as i32 - offset) as i8),
        };
        let of_grid = |codes: &[u8; 16], unit: f32| {
            let facts = format.codes().expect("grids are quantised");
            let kind = if facts.halves { Kind::SuperHalves } else { Kind::Super };
            table(kind, codes, facts.offset, unit)
        };
        Some(match format {
            Format::F32 => plain(Width::F32, Kind::None, 0),
            Format::F16 => plain(Width::F16, Kind::None, 0),
            Format::Bf16 => plain(Width::Bf16, Kind::None, 0),
            Format::Q8_0 => plain(Width::Eight, Kind::F16, 0),
            Format::Q4_0 => plain(Width::Four, Kind::F16, -8),
            Format::Q4_1 => plain(Width::Four, Kind::F16Bias, 0),
            Format::Q5_0 => plain(Width::Six, Kind::F16, -16),
            Format::Q5_1 => plain(Width::Six, Kind::F16Bias, 0),
            Format::Q2K => plain(Width::Four, Kind::SuperBiasHalves, 0),
            Format::Q3K => plain(Width::Four, Kind::SuperHalves, -4),
            Format::Q4K => plain(Width::Four, Kind::SuperBias, 0),
            Format::Q5K => plain(Width::Six, Kind::SuperBias, 0),
            Format::Q6K => plain(Width::Six, Kind::SuperHalves, -32),
            Format::Iq4Nl => table(Kind::F16, &IQ4_CODES, 127, 1.0),
            Format::Iq4Xs => table(Kind::Super, &IQ4_CODES, 127, 1.0),
            Format::Mxfp4 | Format::Mxfp4Split => table(Kind::E8m0, &E2M1_CODES, 12, 1.0),
            Format::Iq1S => of_grid(&grid::Iq1S::CODES, grid::Iq1S::UNIT),
            Format::Iq1M => of_grid(&grid::Iq1M::CODES, grid::Iq1M::UNIT),
            Format::Iq2Xxs => of_grid(&grid::Iq2Xxs::CODES, grid::Iq2Xxs::UNIT),
            Format::Iq2Xs => of_grid(&grid::Iq2Xs::CODES, grid::Iq2Xs::UNIT),
            Format::Iq2S => of_grid(&grid::Iq2S::CODES, grid::Iq2S::UNIT),
            Format::Iq3Xxs => of_grid(&grid::Iq3Xxs::CODES, grid::Iq3Xxs::UNIT),
            Format::Iq3S => of_grid(&grid::Iq3S::CODES, grid::Iq3S::UNIT),
            Format::MlxAffine { bits, group, params } => {
                let (width, plus) = match bits {
                    ..=4 => (Width::Four, 0),
                    5 | 6 => (Width::Six, 0),
                    _ => (Width::Eight, 128),
                };
                let kind = match params {
                    ParamType::Bf16 => Kind::Bf16Bias,
                    ParamType::F16 => Kind::F16Bias,
                    ParamType::F32 => Kind::F32Bias,
                };
                Layout { shift: (group as u32 / BLOCK as u32).ilog2(), ..plain(width, kind, plus) }
            }
            _ => return None,
        })
    }

    /// Which of the kernels' specialised combinations this is: `enum Variant`.
    pub(crate) fn variant(&self) -> u32 {
        match (self.width, self.kind) {
            (Width::FourTable, Kind::E8m0) => 0,
            (Width::Eight, Kind::F16) => 1,
            (Width::Four, Kind::SuperBias) => 2,
            (Width::Six, Kind::SuperHalves) => 3,
            (Width::Four, Kind::Bf16Bias) => 4,
            _ => 5,
        }
    }

    /// Bytes of a row of `cols` in each plane.
    pub(crate) fn row_bytes(&self, cols: usize) -> [usize; PLANES] {
        let (blocks, groups) = (cols / BLOCK, cols.div_ceil(GROUP));
        let codes = match self.width {
            Width::F32 => 4 * cols,
            Width::F16 | Width::Bf16 => 2 * cols,
            Width::Four | Width::FourTable | Width::Six => 16 * blocks,
            Width::Eight => 32 * blocks,
        };
        let high = if self.width == Width::Six { 8 * blocks } else { 0 };
        let (scales, supers) = match self.kind {
            Kind::None => (0, 0),
            Kind::E8m0 => (blocks, 0),
            Kind::F16 => (2 * blocks, 0),
            Kind::F16Bias | Kind::Bf16Bias => (4 * (blocks >> self.shift), 0),
            Kind::F32Bias => (8 * (blocks >> self.shift), 0),
            Kind::Super => (blocks, 2 * groups),
            Kind::SuperHalves => (2 * blocks, 2 * groups),
            Kind::SuperBias => (2 * blocks, 4 * groups),
            Kind::SuperBiasHalves => (4 * blocks, 4 * groups),
        };
        [codes, high, scales, supers]
    }

    /// Bytes of a matrix, planes aligned as [`crate::load`] aligns them.
    pub(crate) fn bytes(&self, rows: usize, cols: usize) -> u64 {
        let planes = self.row_bytes(cols).map(|b| (b as u64 * rows as u64).next_multiple_of(256));
        planes.iter().sum()
    }

    /// Takes rows of a matrix apart: `out` holds the planes of exactly these rows.
    pub(crate) fn repack(&self, m: &MatrixView<'_>, rows: Range<usize>, out: [&mut [u8]; PLANES]) {
        let sizes = self.row_bytes(m.cols());
        let [codes, high, scales, supers] = out;
        for (i, row) in rows.enumerate() {
            let part = |plane: usize| i * sizes[plane]..(i + 1) * sizes[plane];
            let codes = &mut codes[part(0)];
            if self.kind == Kind::None {
                codes.copy_from_slice(m.row(0, row));
                continue;
            }
            self.row_codes(m, row, codes, &mut high[part(1)]);
            row_scales(self.kind, m, row, &mut scales[part(2)], &mut supers[part(3)]);
        }
    }

    fn row_codes(&self, m: &MatrixView<'_>, row: usize, codes: &mut [u8], high: &mut [u8]) {
        // Formats whose nibbles need no look at their codes: (bytes before, bytes of a block).
        let nibbles = match m.format() {
            Format::Mxfp4 => Some((1, 17)),
            Format::Q4_0 | Format::Iq4Nl => Some((2, 18)),
            Format::Q4_1 => Some((4, 20)),
            _ => None,
        };
        if let Some((skip, size)) = nibbles {
            for (from, to) in m.row(0, row).chunks_exact(size).zip(codes.chunks_exact_mut(16)) {
                let from: &[u8; 16] = from[skip..].try_into().expect("32 nibbles");
                match self.width {
                    Width::FourTable => to.copy_from_slice(&sequential(from)),
                    _ => to.copy_from_slice(from),
                }
            }
            return;
        }
        if m.format() == Format::Q8_0 {
            for (from, to) in m.row(0, row).chunks_exact(34).zip(codes.chunks_exact_mut(32)) {
                for (i, to) in to.chunks_exact_mut(4).enumerate() {
                    to.copy_from_slice(&from[2 + 4 * (i / 2 + 4 * (i % 2))..][..4]);
                }
            }
            return;
        }
        let index = self.index_of(m.format());
        let mut group = Group::EMPTY;
        for g in 0..m.groups() {
            let blocks = (m.cols() / BLOCK - g * LANES).min(LANES);
            decode_group(m.format(), m.group(row, g), blocks, &mut group);
            for b in 0..blocks {
                let c: &[u8; 32] = group.codes[b * BLOCK..][..BLOCK].try_into().expect("32 codes");
                let at = g * LANES + b;
                match self.width {
                    Width::Eight => {
                        for (i, to) in codes[32 * at..][..32].iter_mut().enumerate() {
                            let (t, half, k) = (i / 8, i / 4 % 2, i % 4);
                            *to = c[16 * half + 4 * t + k] ^ 0x80;
                        }
                    }
                    width => {
                        let halves: [u8; 16] = std::array::from_fn(|i| {
                            (index[c[i] as usize] & 15) | index[c[16 + i] as usize] << 4
                        });
                        let to = &mut codes[16 * at..][..16];
                        match width {
                            Width::FourTable => to.copy_from_slice(&sequential(&halves)),
                            _ => to.copy_from_slice(&halves),
                        }
                    }
                }
                if self.width == Width::Six {
                    let high = &mut high[8 * at..][..8];
                    high.fill(0);
                    for (e, code) in c.iter().enumerate() {
                        high[4 * (e / 16) + e % 4] |= (code >> 4) << (2 * (e / 4 % 4));
                    }
                }
            }
        }
    }

    /// Stored code of each code of the format.
    fn index_of(&self, format: Format) -> [u8; 256] {
        let offset = format.codes().map_or(0, |f| f.offset);
        std::array::from_fn(|code| match self.width {
            Width::FourTable => {
                let same = |t: &i8| *t as i32 == code as i32 - offset;
                self.table.iter().position(same).unwrap_or(0) as u8
            }
            _ => code as u8,
        })
    }
}

/// From bytes that hold elements `i` and `i + 16` to dwords that hold `4 t .. 4 t + 4` and `16 + 4 t ..`.
fn sequential(halves: &[u8; 16]) -> [u8; 16] {
    let mut out = [0; 16];
    for (from, to) in halves.chunks_exact(4).zip(out.chunks_exact_mut(4)) {
        to[0] = (from[0] & 15) | (from[1] & 15) << 4;
        to[1] = (from[2] & 15) | (from[3] & 15) << 4;
        to[2] = from[0] >> 4 | (from[1] & 0xf0);
        to[3] = from[2] >> 4 | (from[3] & 0xf0);
    }
    out
}

/// The scales of one row.
fn row_scales(kind: Kind, m: &MatrixView<'_>, row: usize, scales: &mut [u8], supers: &mut [u8]) {
    let bytes = m.row(0, row);
    let format = m.format();
    match (kind, format) {
        (Kind::E8m0, Format::Mxfp4) => {
            for (to, block) in scales.iter_mut().zip(bytes.chunks_exact(17)) {
                *to = block[0];
            }
        }
        (Kind::E8m0, _) => scales.copy_from_slice(m.row(1, row)),
        (_, Format::MlxAffine { params, .. }) => {
            let size = params.bytes();
            let (ws, wb) = (m.row(1, row).chunks_exact(size), m.row(2, row).chunks_exact(size));
            for (to, (ws, wb)) in scales.chunks_exact_mut(2 * size).zip(ws.zip(wb)) {
                to[..size].copy_from_slice(ws);
                to[size..].copy_from_slice(wb);
            }
        }
        (Kind::F16, _) => first_bytes::<2>(bytes, format, scales),
        (Kind::F16Bias, _) => first_bytes::<4>(bytes, format, scales),
        _ => {
            let size = format.group_bytes()[0];
            let sizes = [scales.len() / m.groups(), supers.len() / m.groups()];
            for (g, block) in bytes.chunks_exact(size).enumerate() {
                let scales = &mut scales[g * sizes[0]..][..sizes[0]];
                super_scales(format, block, scales, &mut supers[g * sizes[1]..][..sizes[1]]);
            }
        }
    }
}

/// The first `N` bytes of every block.
fn first_bytes<const N: usize>(bytes: &[u8], format: Format, out: &mut [u8]) {
    let size = format.layouts().0[0].bytes;
    for (block, to) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(N)) {
        to.copy_from_slice(&block[..N]);
    }
}

/// Multipliers and scales of a super-block.
fn super_scales(format: Format, block: &[u8], scales: &mut [u8], supers: &mut [u8]) {
    let array12 = |at: usize| -> [u8; 12] { block[at..at + 12].try_into().expect("12 bytes") };
    match format {
        Format::Q4K | Format::Q5K => {
            supers.copy_from_slice(&block[..4]);
            let (sc, mn) = q4_k_scales(&array12(4));
            for (to, (sc, mn)) in
                scales.chunks_exact_mut(2).zip(sc.to_le_bytes().into_iter().zip(mn.to_le_bytes()))
            {
                to.copy_from_slice(&[sc, mn]);
            }
        }
        Format::Q6K => {
            supers.copy_from_slice(&block[208..210]);
            scales.copy_from_slice(&block[192..208]);
        }
        Format::Q2K => {
            supers.copy_from_slice(&block[80..84]);
            for (to, packed) in scales.chunks_exact_mut(2).zip(&block[..16]) {
                to.copy_from_slice(&[packed & 15, packed >> 4]);
            }
        }
        Format::Q3K => {
            supers.copy_from_slice(&block[108..110]);
            halves(q3_k_scales(&array12(96)), scales);
        }
        Format::Iq4Xs => {
            supers.copy_from_slice(&block[..2]);
            let packed: [u8; 6] = block[2..8].try_into().expect("6 bytes");
            scales.copy_from_slice(&iq4_xs_scales(&packed).to_le_bytes());
        }
        Format::Iq1S => grid_scales::<grid::Iq1S>(block, scales, supers),
        Format::Iq1M => grid_scales::<grid::Iq1M>(block, scales, supers),
        Format::Iq2Xxs => grid_scales::<grid::Iq2Xxs>(block, scales, supers),
        Format::Iq2Xs => grid_scales::<grid::Iq2Xs>(block, scales, supers),
        Format::Iq2S => grid_scales::<grid::Iq2S>(block, scales, supers),
        Format::Iq3Xxs => grid_scales::<grid::Iq3Xxs>(block, scales, supers),
        Format::Iq3S => grid_scales::<grid::Iq3S>(block, scales, supers),
        other => unreachable!("{} has no super-blocks", other.name()),
    }
}

/// Interleaves the multipliers of first and second halves.
fn halves(by_half: [u64; 2], out: &mut [u8]) {
    let [first, second] = by_half.map(u64::to_le_bytes);
    for (b, to) in out.chunks_exact_mut(2).enumerate() {
        to.copy_from_slice(&[first[b], second[b]]);
    }
}

fn grid_scales<G: GridFormat>(block: &[u8], scales: &mut [u8], supers: &mut [u8]) {
    supers.copy_from_slice(&G::d(block).to_le_bytes());
    let odd = G::scales(block).map(|s| (2 * s) | 0x0101_0101_0101_0101);
    match scales.len() == LANES {
        true => scales.copy_from_slice(&odd[0].to_le_bytes()),
        false => halves(odd, scales),
    }
}
