//! Recordings of any format: an error that names the place, or programs whose events refer to blocks
//! that there are.
#![no_main]

use std::path::Path;

use aquifer_trace::input;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(programs) = input::read(Path::new("fuzzed"), bytes) else { return };
    for program in &programs {
        let _ = aquifer_trace::profile::Profile::of(program);
    }
});
