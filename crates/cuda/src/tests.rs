//! The kernels in the emulator, where a C++ compiler is at hand: `cargo test -p forebay-cuda --features emulator`.

#[cfg(feature = "emulator")]
mod emulator {
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::sync::Arc;

    use crate::backend::Gpu;
    use crate::driver::emulated::Emulated;
    use crate::selftest;

    /// Compiles the kernels for the CPU; none without a compiler.
    fn emulator() -> Option<PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels");
        let out = std::env::temp_dir().join(format!("forebay-emulator-{}", std::process::id()));
        std::fs::create_dir_all(&out).unwrap();
        let source = out.join("kernels.cpp");
        std::fs::write(&source, crate::images::SOURCE).unwrap();
        let library = out.join("kernels.so");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let status = Command::new(&compiler)
            .args(["-std=c++17", "-O1", "-ffp-contract=off", "-mfma", "-mf16c", "-fPIC", "-shared"])
            .arg("-DFOREBAY_EMULATED")
            .arg("-I")
            .arg(&folder)
            .args([&source, Path::new("-o"), &library])
            .status();
        match status {
            Ok(s) => {
                assert!(s.success(), "{compiler} refuses the kernels");
                Some(library)
            }
            Err(e) => {
                eprintln!("skipped: no C++ compiler ({compiler}: {e})");
                None
            }
        }
    }

    #[test]
    fn products_of_every_format_have_the_oracles_bits() {
        let Some(library) = emulator() else { return };
        let gpu = Gpu(Arc::new(Emulated::load(&library).unwrap()));
        let report = selftest::products(&gpu, 1).unwrap();
        assert!(report.finite > report.numbers / 2, "{report:?}");
        assert!(report.different.is_empty(), "{}", report.different.join("\n"));
    }
}
