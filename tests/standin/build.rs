//! Names the library as the CUDA driver's on Linux: a later load of `libcuda.so` gets it, if it
//! is loaded already. Its own references to what it exports are settled when it is linked, so that
//! symbols can be hidden from others (`src/loader.rs`).

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
        println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    }
}
