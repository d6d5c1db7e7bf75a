//! `matmul`.

use half::{bf16, f16};
use proptest::prelude::*;

use crate::bench::{Bench, Plain, assert_agree};

fn check<T: Plain>(
    bench: &Bench,
    [m, k, n]: [usize; 3],
    element: impl Fn(usize) -> T,
    wide: impl Fn(T) -> f32,
    narrow: impl Fn(f32) -> T,
) {
    let a: Vec<T> = (0..m * k).map(&element).collect();
    let b: Vec<T> = (0..k * n).map(|index| element(index + 7)).collect();
    let (left, right) = (bench.guarded(&a, 1), bench.guarded(&b, 2));
    let mut product = bench.guarded(&vec![element(0); m * n], 3);
    let extents = [m as u64, k as u64, n as u64];
    bench.kernels.matmul(&bench.stream, &left.part, &right.part, &mut product.part, extents).unwrap();
    let dot = |i: usize, j: usize| (0..k).fold(0f32, |sum, l| wide(a[i * k + l]).mul_add(wide(b[l * n + j]), sum));
    let should: Vec<T> = (0..m * n).map(|index| narrow(dot(index / n, index % n))).collect();
    assert_agree(&bench.between(&product), &should, |value| wide(value).is_nan());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn products_are_sums_in_the_order_of_k(m in 0usize..80, k in 0usize..50, n in 0usize..80, seed in any::<u32>()) {
        let bench = Bench::new();
        let value = |index: usize| {
            let bits = (index as u32).wrapping_add(seed).wrapping_mul(0x9E37_79B1);
            (bits >> 8) as f32 / (1 << 22) as f32 - 2.0
        };
        check(&bench, [m, k, n], value, |x: f32| x, |x| x);
        check(&bench, [m, k, n], |index| f16::from_f32(value(index)), f16::to_f32, f16::from_f32);
        check(&bench, [m, k, n], |index| bf16::from_f32(value(index)), bf16::to_f32, bf16::from_f32);
    }
}

#[test]
fn the_awkward_values() {
    let bench = Bench::new();
    let values = [f32::NAN, f32::INFINITY, -0.0, f32::MIN_POSITIVE / 2.0, 1e30, -1e30, 0.0];
    check(&bench, [3, 1, 9], |index| values[index % 7], |x: f32| x, |x| x);
    check(&bench, [65, 17, 66], |index| values[1 + index % 6], |x: f32| x, |x| x);
    let tiny = [-1e-30, 1e-30];
    check(&bench, [2, 1, 2], |index| tiny[index % 2], |x: f32| x, |x| x);
}

#[test]
fn it_costs_its_operations() {
    let args = |m: u64, k, n| {
        let ptr = aquifer_device::KernelArg::Ptr(aquifer_device::DevicePtr(512));
        [ptr, ptr, ptr].into_iter().chain([m, k, n].map(aquifer_device::KernelArg::U64)).collect::<Vec<_>>()
    };
    let kernel = aquifer_kernels::find("matmul_f32").unwrap();
    assert_eq!(kernel.launch(None, args(100, 200, 300), 1).unwrap().operations, 12_000_000);
    assert!(kernel.launch(None, args(u64::MAX, 2, 1), 1).is_err());
}
