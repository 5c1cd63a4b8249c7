//! The models that come with the repository.

use std::path::{Path, PathBuf};

use forebay_files::{Catalog, Dtype};
use forebay_quant::Format;

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(name)
}

#[test]
fn counts() {
    let rows = [
        ("tiny-gemma4-mlx4", false, 268, 4_476_108),
        ("tiny-gpt-oss", false, 117, 10_070_304),
        ("tiny-qwen3-moe/qwen3_moe-Q4_K_M.gguf", true, 74, 4_582_144),
        ("tiny-qwen3-moe", true, 74, 4_582_144),
        ("tiny-qwen3.5-moe", true, 168, 7_664_512),
        ("tiny-qwen3.5-moe-dflash", false, 25, 2_756_096),
    ];
    for (name, gguf, tensors, weight_bytes) in rows {
        let catalog = Catalog::open(&model(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(catalog.is_gguf(), gguf, "{name}");
        assert_eq!(catalog.files.len(), 1, "{name}");
        assert_eq!(
            (catalog.tensors.len(), catalog.weight_bytes()),
            (tensors, weight_bytes),
            "{name}"
        );
        assert_eq!(catalog.config().is_some(), !gguf, "{name}");
        catalog.check_unchanged().unwrap();
    }
}

#[test]
fn types_and_shapes() {
    type Row<'a> = (&'a str, &'a str, Dtype, &'a [u64]);
    let rows: &[Row<'_>] = &[
        ("tiny-qwen3-moe", "output_norm.weight", Dtype::F32, &[256]),
        ("tiny-qwen3-moe", "token_embd.weight", Dtype::Ggml(Format::Q6K), &[4096, 256]),
        ("tiny-qwen3-moe", "blk.0.ffn_down_exps.weight", Dtype::Ggml(Format::Q5_0), &[16, 256, 64]),
        ("tiny-qwen3-moe", "blk.0.ffn_gate_exps.weight", Dtype::Ggml(Format::Q4K), &[16, 64, 256]),
        (
            "tiny-qwen3.5-moe",
            "blk.0.ffn_down_exps.weight",
            Dtype::Ggml(Format::Q8_0),
            &[16, 256, 64],
        ),
        ("tiny-gpt-oss", "lm_head.weight", Dtype::Bf16, &[4096, 256]),
    ];
    for (name, tensor, dtype, shape) in rows {
        let catalog = Catalog::open(&model(name)).unwrap();
        let found = catalog.tensor(tensor).unwrap_or_else(|| panic!("{name}: no {tensor}"));
        assert_eq!((found.dtype, found.shape.as_slice()), (*dtype, *shape), "{name}: {tensor}");
    }
}
