#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    (forebay_inputs::target("template").run)(bytes);
});
