//! The list of all kernels, from the declarations in the files of the operations.

use crate::kernel::Kernel;
use crate::{add, axpy, cast, fill, matmul, pattern, reduce, spin, strided};

const PARTS: &[&[Kernel]] = &[
    &[fill::FILL],
    &[pattern::WRITE, pattern::VERIFY],
    axpy::KERNELS,
    add::KERNELS,
    cast::KERNELS,
    reduce::SUMS,
    reduce::FINISHES,
    strided::GATHERS,
    strided::SCATTERS,
    matmul::KERNELS,
    &[spin::SPIN],
];

static ALL: [Kernel; count()] = all();

/// Every kernel of the set.
pub static KERNELS: &[Kernel] = &ALL;

const fn count() -> usize {
    let (mut total, mut part) = (0, 0);
    while part < PARTS.len() {
        total += PARTS[part].len();
        part += 1;
    }
    total
}

const fn all() -> [Kernel; count()] {
    let mut all = [PARTS[0][0]; count()];
    let (mut at, mut part) = (0, 0);
    while part < PARTS.len() {
        let mut index = 0;
        while index < PARTS[part].len() {
            all[at] = PARTS[part][index];
            at += 1;
            index += 1;
        }
        part += 1;
    }
    all
}

/// The kernel with the given name.
///
/// ```
/// use aquifer_kernels::{KernelParam, find};
/// assert_eq!(find("fill").unwrap().params, [KernelParam::Ptr, KernelParam::U64, KernelParam::U64]);
/// assert!(find("flil").is_none());
/// ```
pub fn find(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.name == name)
}
