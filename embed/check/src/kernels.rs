//! Addresses among the parameters of kernels.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use crate::call::{Next, PARAMETERS};

/// Offset and size of each parameter.
type Sizes = Option<Arc<[usize]>>;

/// What is known of kernels, by handle.
#[derive(Debug, Default)]
pub(crate) struct Kernels {
    sizes: HashMap<u64, Sizes>,
    pub(crate) launched: u64,
    /// Launches whose parameters could not be read.
    pub(crate) skipped: u64,
}

impl Kernels {
    /// Handles may be given again.
    pub(crate) fn forget(&mut self) {
        self.sizes.clear();
    }

    /// The words of 8 bytes in the parameters of a launch that the driver has accepted.
    pub(crate) fn words(&mut self, function: u64, parameters: *const *const c_void) -> Vec<u64> {
        self.launched += 1;
        let sizes = self.sizes.entry(function).or_insert_with(|| sizes(function)).clone();
        let (Some(sizes), false) = (sizes, parameters.is_null()) else {
            self.skipped += 1;
            return Vec::new();
        };
        let mut words = Vec::new();
        for (place, size) in sizes.iter().enumerate() {
            // SAFETY: the program vouches for a pointer for each parameter.
            let parameter = unsafe { parameters.add(place) };
            // SAFETY: as above.
            let parameter = unsafe { parameter.read() };
            for at in (0..size / 8).map(|word| word * 8) {
                // SAFETY: the parameter has this size, by the driver.
                let bytes = unsafe { parameter.byte_add(at) }.cast::<u64>();
                // SAFETY: as above.
                words.push(unsafe { bytes.read_unaligned() });
            }
        }
        words
    }
}

/// The sizes of a kernel's parameters, where the driver tells them (CUDA 12.4).
fn sizes(function: u64) -> Sizes {
    type Ask = unsafe extern "C" fn(u64, usize, *mut usize, *mut usize) -> u32;
    let of = |ask: &Next| {
        // SAFETY: the driver's functions of these names have this signature.
        let ask: Ask = unsafe { std::mem::transmute(ask.address()?) };
        let (mut offset, mut size) = (0, 0);
        // A kernel without parameters has none at 0, and neither has a handle of another kind.
        let next = |place| {
            // SAFETY: both are writable, and the handle is one that was launched.
            (unsafe { ask(function, place, &raw mut offset, &raw mut size) } == 0).then_some(size)
        };
        let sizes: Vec<usize> = (0..4096).map_while(next).collect();
        (!sizes.is_empty()).then(|| sizes.into())
    };
    PARAMETERS.iter().find_map(of)
}
