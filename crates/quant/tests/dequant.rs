//! Dequantisation against what outside code made of the same bytes (`tools/make_quant_vectors.py`), to the bit.

use forebay_quant::{
    BadScale, Format, MatrixView, ParamType, PlaneView, check_scales, dequantize_row,
};

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(n);
        self.0 = tail;
        head
    }
    fn u8(&mut self) -> usize {
        self.take(1)[0] as usize
    }
    fn u32(&mut self) -> usize {
        u32::from_le_bytes(self.take(4).try_into().unwrap()) as usize
    }
}

fn format(name: &str) -> Format {
    match name {
        "MXFP4 split" => Format::Mxfp4Split,
        mlx if mlx.starts_with("MLX") => {
            let parts: Vec<&str> = mlx.split(' ').collect();
            let params = match parts[3] {
                "F32" => ParamType::F32,
                "F16" => ParamType::F16,
                "BF16" => ParamType::Bf16,
                other => panic!("{other}"),
            };
            let (bits, group) = (parts[1].parse().unwrap(), parts[2].parse().unwrap());
            Format::MlxAffine { bits, group, params }
        }
        name => *Format::all().iter().find(|f| f.name() == name).expect(name),
    }
}

#[test]
fn stored_vectors() {
    let mut r = Reader(include_bytes!("data/dequant.bin"));
    for _ in 0..r.u32() {
        let n = r.u8();
        let name = std::str::from_utf8(r.take(n)).unwrap();
        let (rows, cols, n_planes) = (r.u32(), r.u32(), r.u8());
        let planes: Vec<PlaneView<'_>> = (0..n_planes)
            .map(|_| {
                let n = r.u32();
                PlaneView { data: r.take(n), stride: n / rows }
            })
            .collect();
        let view = MatrixView::new(format(name), rows, cols, &planes).unwrap();
        for row in 0..rows {
            let mut out = vec![0.0; cols];
            dequantize_row(&view, row, &mut out);
            for (c, got) in out.iter().enumerate() {
                let expected = f32::from_bits(r.u32() as u32);
                // MLX keeps the sign of a zero E2M1 code, GGUF does not, and neither do we.
                let same = got.to_bits() == expected.to_bits() || (*got == 0.0 && expected == 0.0);
                assert!(same, "{name}: row {row} column {c}: {got} != {expected}");
            }
        }
    }
    assert!(r.0.is_empty());
}

#[test]
fn nan_scales_are_found() {
    let mut data = vec![0u8; 2 * 3 * 17];
    fn view(data: &[u8]) -> MatrixView<'_> {
        MatrixView::new(Format::Mxfp4, 2, 96, &[PlaneView { data, stride: 3 * 17 }]).unwrap()
    }
    assert_eq!(check_scales(&view(&data)), Ok(()));
    data[(3 + 2) * 17] = 255;
    let view = view(&data);
    assert_eq!(check_scales(&view), Err(BadScale { row: 1, block: 2 }));
    let mut out = [0.0; 96];
    dequantize_row(&view, 1, &mut out);
    assert!(out[63].is_finite() && out[64].is_nan());
}
