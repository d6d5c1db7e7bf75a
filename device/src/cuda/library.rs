//! Finding the driver's library. It is kept for the life of the process: a driver cannot be unloaded safely.

use libloading::Library;

use crate::unavailable::Unavailable;

/// The driver's library by the names under which it is installed. The bare name, last on Unix, is also that of a toolkit's
/// stub.
#[cfg(windows)]
const NAMES: [&str; 1] = ["nvcuda.dll"];
#[cfg(not(windows))]
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Opens the driver's library: one that the process has loaded already, else the one that the system finds.
///
/// What is loaded already comes first because two drivers in one process do not know each other's handles.
pub(super) fn open() -> Result<Library, Unavailable> {
    if let Some(library) = NAMES.iter().rev().find_map(|name| loaded(name)) {
        return Ok(library);
    }
    let mut reasons = Vec::new();
    for name in NAMES {
        // SAFETY: the library under this name is the CUDA driver, whose initialisation is sound on any thread.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => reasons.push((name, first_cause(&error))),
        }
    }
    Err(Unavailable::NoDriver { reason: together(&reasons) })
}

/// What the system's loader said, which is below what the crate that called it says.
fn first_cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), first_cause)
}

/// Why each library could not be loaded. Most loaders begin the reason with the name. Libraries with the same reason
/// share it.
fn together(reasons: &[(&str, String)]) -> String {
    let mut shared: Vec<(String, &str)> = Vec::new();
    for (name, said) in reasons {
        let cause = said.strip_prefix(name).and_then(|said| said.strip_prefix(": ")).unwrap_or(said);
        match shared.last_mut() {
            Some((names, last)) if *last == cause => *names += &format!(" and {name}"),
            _ => shared.push(((*name).to_owned(), cause)),
        }
    }
    let told: Vec<String> = shared.into_iter().map(|(names, cause)| format!("{names}: {cause}")).collect();
    told.join("; ")
}

/// The library if the process has loaded it.
#[cfg(target_os = "linux")]
fn loaded(name: &str) -> Option<Library> {
    use libloading::os::unix;
    /// Do not load what is not loaded, from `dlfcn.h` of Linux's C libraries.
    const RTLD_NOLOAD: std::ffi::c_int = 4;
    // SAFETY: nothing is loaded, so no initialisation runs.
    unsafe { unix::Library::open(Some(name), unix::RTLD_LAZY | RTLD_NOLOAD) }.ok().map(Library::from)
}

#[cfg(not(target_os = "linux"))]
fn loaded(_name: &str) -> Option<Library> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_named_once() {
        assert_eq!(together(&[("libcuda.so.1", "libcuda.so.1: cannot open".into())]), "libcuda.so.1: cannot open");
        assert_eq!(together(&[("nvcuda.dll", "not found".into())]), "nvcuda.dll: not found");
    }

    #[test]
    fn a_reason_is_told_once() {
        let [one, two] = ["libcuda.so.1", "libcuda.so"];
        let reasons = |last: &str| [(one, format!("{one}: no such file")), (two, format!("{two}: {last}"))];
        assert_eq!(together(&reasons("no such file")), "libcuda.so.1 and libcuda.so: no such file");
        assert_eq!(together(&reasons("wrong class")), "libcuda.so.1: no such file; libcuda.so: wrong class");
    }
}
