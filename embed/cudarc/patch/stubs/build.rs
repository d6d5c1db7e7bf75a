//! In place of the build script of candle-kernels, which calls nvcc: modules without kernels, and
//! functions that do nothing.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

const MODULES: [&str; 11] = [
    "AFFINE", "BINARY", "CAST", "CONV", "FILL", "INDEXING", "QUANTIZED", "REDUCE", "SORT", "TERNARY", "UNARY",
];

fn main() {
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    let ptx = ".version 8.2\\n.target sm_75\\n.address_size 64\\n";
    let modules: String = MODULES.map(|name| format!("pub const {name}: &str = \"{ptx}\";\n")).concat();
    fs::write(out.join("ptx.rs"), modules).expect("the folder is there");

    let declared = fs::read_to_string("src/ffi.rs").expect("the package has it");
    let names = declared.lines().filter_map(|line| line.trim().strip_prefix("pub fn ")?.split('(').next());
    let stubs: String = names.map(|name| format!("void {name}(void) {{}}\n")).collect();
    let (source, object) = (out.join("stubs.c"), out.join("stubs.o"));
    fs::write(&source, stubs).expect("the folder is there");
    let run = |command: &mut Command| assert!(command.status().expect("a C compiler is there").success());
    run(Command::new("cc").arg("-w").arg("-fPIC").arg("-c").arg(&source).arg("-o").arg(&object));
    run(Command::new("ar").arg("crs").arg(out.join("libstubs.a")).arg(&object));
    println!("cargo:rustc-link-search={}", out.display());
    println!("cargo:rustc-link-lib=static=stubs");
}
