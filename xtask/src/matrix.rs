//! The support matrix of the README, from the code's own tables.

use std::fmt::Write;

use forebay_files::ggml_types::GGML_TYPES;
use forebay_models::families::FAMILIES;
use forebay_quant::Format;

/// What stands before and behind the matrix in the README.
#[cfg(test)]
pub const MARKER: &str = "<!-- matrix -->";

/// Families and formats as Markdown.
pub fn matrix() -> String {
    let mut text = String::from(
        "| family | `model_type` of folders | architecture of GGUF files |\n|---|---|---|\n",
    );
    for family in FAMILIES {
        let (folders, gguf) = (family.model_types.join(", "), family.gguf.join(", "));
        line(&mut text, &[family.name, or_none(&folders), or_none(&gguf)]);
    }
    text.push_str(
        "\nEvery family computes with every format, and tensors of one model may differ:\n\n",
    );
    text.push_str("| weights | bits per weight | found in | scale per |\n|---|---|---|---|\n");
    for &format in Format::all() {
        let bits = format!("{:.4}", 8.0 * bytes_per_weight(format));
        let bits = bits.trim_end_matches('0').trim_end_matches('.');
        let per = match format.codes() {
            None => "".into(),
            Some(codes) => scale_per(format, codes.halves),
        };
        line(&mut text, &[&name(format), bits, containers(format), &per]);
    }
    text
}

fn line(text: &mut String, cells: &[&str]) {
    for cell in cells {
        write!(text, "| {cell} ").expect("a string takes everything");
    }
    text.push_str("|\n");
}

fn or_none(names: &str) -> &str {
    if names.is_empty() { "as llama" } else { names }
}

fn name(format: Format) -> String {
    match format {
        Format::MlxAffine { bits, .. } => format!("MLX affine {bits} bits"),
        _ => format.name(),
    }
}

fn bytes_per_weight(format: Format) -> f64 {
    format.planes().iter().map(|p| p.bytes as f64 / p.elements as f64).sum()
}

fn containers(format: Format) -> &'static str {
    match (GGML_TYPES.iter().any(|t| t.format == Some(format)), format.is_quantized()) {
        (true, false) => "GGUF, folders",
        (true, true) => "GGUF",
        (false, _) => "folders",
    }
}

fn scale_per(format: Format, halves: bool) -> String {
    match (format, halves) {
        (Format::MlxAffine { .. }, _) => {
            let groups = (1..=1024).filter(|&g| Format::is_mlx_affine(4, g));
            groups.map(|g| g.to_string()).collect::<Vec<_>>().join(", ")
        }
        (_, true) => "16".into(),
        (_, false) => "32".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readme_has_the_matrix() {
        let readme = include_str!("../../README.md");
        let parts: Vec<&str> = readme.split(MARKER).collect();
        assert_eq!(parts.len(), 3, "README.md needs two markers {MARKER}");
        assert!(
            parts[1].trim() == matrix().trim(),
            "README.md is behind: put what `cargo xtask matrix` prints between the markers"
        );
    }
}
