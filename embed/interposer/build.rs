//! Names the library as the CUDA driver's, and makes the driver a dependency of it by a name that
//! only `aquifer-stress run` gives it. The linker needs a library of that name: an empty one.

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
    // An archive without members: compilers want an input.
    let nothing = folder.join("nothing.a");
    fs::write(&nothing, "!<arch>\n").expect("the build's folder can be written");
    let linker = env::var_os("RUSTC_LINKER").unwrap_or_else(|| "cc".into());
    let linked = Command::new(&linker)
        .args(["-shared", "-nostdlib", "-Wl,-soname,libaquifer_driver.so", "-o"])
        .arg(folder.join("libaquifer_driver.so"))
        .arg(&nothing)
        .status();
    assert!(linked.is_ok_and(|status| status.success()), "{} could not link an empty library", linker.display());
    for argument in ["-soname,libcuda.so.1", "-Bsymbolic", "--no-as-needed", "-z,nodelete"] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
    println!("cargo:rustc-cdylib-link-arg=-L{}", folder.display());
    println!("cargo:rustc-cdylib-link-arg=-l:libaquifer_driver.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--as-needed");
}
