//! Names the library as the CUDA driver's, and makes two names that only `aquifer-stress run` gives
//! dependencies of it: the driver's second name, which is this library again, then the driver. The
//! linker needs libraries of these names: empty ones.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    // An empty assembler file: of an archive without members, linkers make a library without a
    // name.
    let nothing = folder.join("nothing.s");
    fs::write(&nothing, "").expect("the build's folder can be written");
    let linker = env::var_os("RUSTC_LINKER").unwrap_or_else(|| "cc".into());
    let needed = [("libaquifer_second_name.so", "libcuda.so"), ("libaquifer_driver.so", "libaquifer_driver.so")];
    for (file, name) in needed {
        let linked = Command::new(&linker)
            .args(["-shared", "-nostdlib", &format!("-Wl,-soname,{name}"), "-o"])
            .arg(folder.join(file))
            .arg(&nothing)
            .status();
        assert!(linked.is_ok_and(|status| status.success()), "{} could not link an empty library", linker.display());
    }
    for argument in ["-soname,libcuda.so.1", "-Bsymbolic", "--no-as-needed", "-z,nodelete"] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
    // Both are in the folder of this library. A program's RPATH, which would come first, may have
    // stubs.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--enable-new-dtags,-rpath,$ORIGIN");
    println!("cargo:rustc-cdylib-link-arg=-L{}", folder.display());
    for (file, _) in needed {
        println!("cargo:rustc-cdylib-link-arg=-l:{file}");
    }
    println!("cargo:rustc-cdylib-link-arg=-Wl,--as-needed");
}
