//! Random bytes that are valid weights: quick enough to fill a disk, the same in every run.

use half::{bf16, f16};

/// What a tensor is filled with, and so how it is stored.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fill {
    /// f32, `mean + std * N(0, 1)`.
    F32 { mean: f32, std: f32 },
    /// bf16, `mean + std * N(0, 1)`.
    Bf16 { mean: f32, std: f32 },
    /// bf16, per row of so many elements: `value * exp(spread * N(0, 1))`, the same factor for every
    /// tensor of the same `salt`.
    Bf16Rows { value: f32, spread: f32, row: u64, salt: u64 },
    /// f32 rows of `std * N(0, 1) * exp(spread * N(0, 1))`, the second draw once per row.
    F32Rows { std: f32, spread: f32, row: u64 },
    /// u32 words of random codes (MLX).
    Codes,
    /// GGUF MXFP4: 17 bytes per 32.
    Mxfp4,
    /// GGUF Q8_0: 34 bytes per 32.
    Q8_0,
    /// GGUF Q4_K: 144 bytes per 256, weights so many times the usual deviation.
    Q4K { gain: f32 },
    /// GGUF Q6_K: 210 bytes per 256.
    Q6K,
}

impl Fill {
    /// Elements and bytes of a block.
    pub fn block(self) -> (u64, u64) {
        match self {
            Fill::F32 { .. } | Fill::F32Rows { .. } | Fill::Codes => (1, 4),
            Fill::Bf16 { .. } | Fill::Bf16Rows { .. } => (1, 2),
            Fill::Mxfp4 => (32, 17),
            Fill::Q8_0 => (32, 34),
            Fill::Q4K { .. } => (256, 144),
            Fill::Q6K => (256, 210),
        }
    }

    /// Bytes of so many elements.
    pub fn bytes(self, elements: u64) -> u64 {
        let (per, bytes) = self.block();
        elements / per * bytes
    }
}

/// A counter-based random stream (SplitMix64, Steele, Lea and Flood 2014).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1].
    fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&mut self) -> f32 {
        let (a, b) = (self.unit(), self.unit());
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    }
}

/// Blocks in a pool of one block format: large tensors are windows into it.
const POOL_BLOCKS: usize = 1 << 20;

/// Makes the bytes of tensors, one after the other.
pub struct Noise {
    rng: Rng,
    pools: Vec<(Fill, Vec<u8>)>,
}

impl Noise {
    /// With a fixed seed.
    pub fn new() -> Noise {
        Noise { rng: Rng::new(7), pools: Vec::new() }
    }

    /// Hands the bytes of a tensor of `elements` to `sink`, piece by piece.
    ///
    /// # Errors
    /// Those of `sink`.
    pub fn fill(
        &mut self,
        fill: Fill,
        elements: u64,
        sink: &mut dyn FnMut(&[u8]) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        match fill {
            Fill::F32 { mean, std } => {
                let values = (0..elements).map(|_| self.normal(mean, std).to_le_bytes());
                let bytes: Vec<u8> = values.flatten().collect();
                sink(&bytes)
            }
            Fill::Bf16 { mean, std } => {
                let values =
                    (0..elements).map(|_| bf16::from_f32(self.normal(mean, std)).to_le_bytes());
                let bytes: Vec<u8> = values.flatten().collect();
                sink(&bytes)
            }
            Fill::Bf16Rows { value, spread, row, salt } => {
                let mut rng = Rng::new(salt);
                for _ in 0..elements / row {
                    let factor: f32 =
                        if spread == 0.0 { 1.0 } else { (spread * rng.normal()).exp() };
                    let value = bf16::from_f32(value * factor).to_le_bytes();
                    sink(&value.repeat(row as usize))?;
                }
                Ok(())
            }
            Fill::F32Rows { std, spread, row } => {
                for _ in 0..elements / row {
                    let std: f32 = std * (spread * self.rng.normal()).exp();
                    let values = (0..row).map(|_| self.normal(0.0, std).to_le_bytes());
                    let bytes: Vec<u8> = values.flatten().collect();
                    sink(&bytes)?;
                }
                Ok(())
            }
            Fill::Codes | Fill::Mxfp4 | Fill::Q8_0 | Fill::Q4K { .. } | Fill::Q6K => {
                self.windows(fill, elements, sink)
            }
        }
    }

    /// `mean` itself costs no draw when nothing is added to it.
    fn normal(&mut self, mean: f32, std: f32) -> f32 {
        if std == 0.0 { mean } else { mean + std * self.rng.normal() }
    }

    fn windows(
        &mut self,
        fill: Fill,
        elements: u64,
        sink: &mut dyn FnMut(&[u8]) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let (per, bytes) = fill.block();
        if !self.pools.iter().any(|(of, _)| *of == fill) {
            let pool = pool(fill, &mut self.rng);
            self.pools.push((fill, pool));
        }
        let (_, pool) = self.pools.iter().find(|(of, _)| *of == fill).expect("just made");
        let mut left = (elements / per) as usize;
        while left > 0 {
            let n = left.min(POOL_BLOCKS / 2);
            let start = self.rng.bits() as usize % (POOL_BLOCKS - n);
            sink(&pool[start * bytes as usize..(start + n) * bytes as usize])?;
            left -= n;
        }
        Ok(())
    }
}

impl Default for Noise {
    fn default() -> Self {
        Noise::new()
    }
}

/// Random codes with scales that give weights of a deviation of about 0.015.
fn pool(fill: Fill, rng: &mut Rng) -> Vec<u8> {
    let (_, bytes) = fill.block();
    let mut pool: Vec<u8> =
        (0..POOL_BLOCKS * bytes as usize / 8 + 1).flat_map(|_| rng.bits().to_le_bytes()).collect();
    for block in pool.chunks_exact_mut(bytes as usize) {
        let mut scale = |at: usize, v: f32| {
            block[at..at + 2].copy_from_slice(&f16::from_f32(v).to_le_bytes());
        };
        match fill {
            Fill::Q8_0 => scale(0, 0.0002),
            Fill::Q4K { gain } => {
                // d and dmin; sub-scales and minima are random 6-bit numbers, codes 4-bit ones: with
                // dmin = 7.5 d the weights' mean is zero. Were it not, one direction would grow from
                // layer to layer until all tokens chose the same experts.
                scale(0, 0.00006 * gain);
                scale(2, 0.00045 * gain);
            }
            Fill::Q6K => scale(208, 0.00001),
            Fill::Mxfp4 => block[0] = 119 + (block[0] & 1),
            _ => {}
        }
    }
    pool
}
