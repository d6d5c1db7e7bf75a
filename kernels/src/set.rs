//! The list of all kernels, from the declarations in the files of the operations.

use std::sync::LazyLock;

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

/// Every kernel of the set.
pub static KERNELS: LazyLock<Vec<Kernel>> = LazyLock::new(|| PARTS.concat());

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
