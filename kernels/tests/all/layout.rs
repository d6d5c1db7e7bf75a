//! `gather`, `scatter`.

use aquifer_kernels::Strided;
use half::f16;
use proptest::prelude::*;

use crate::bench::{Bench, Plain, assert_agree};

/// Elements that differ as far as their bits allow.
fn numbered<T: Plain>(len: usize) -> Vec<T> {
    (0..len as u64)
        .map(|index| T::of(&(index.wrapping_mul(0x9E37_79B9) >> 3).to_le_bytes()[..size_of::<T>()]))
        .collect()
}

/// The places of a layout's elements in order, by nested loops.
fn places(extents: &[u64], strides: &[u64]) -> Vec<usize> {
    match (extents, strides) {
        ([extent, inner @ ..], [stride, along @ ..]) => {
            let below = places(inner, along);
            (0..*extent).flat_map(|i| below.iter().map(move |at| at + (i * stride) as usize)).collect()
        }
        _ => vec![0],
    }
}

fn check_strided<T: Plain>(bench: &Bench, extents: &[u64], strides: &[u64], shift: u64) {
    let layout = Strided::new(extents, strides).unwrap();
    let places = places(extents, strides);
    assert_eq!(layout.len(), places.len() as u64);
    let reach = places.iter().max().map_or(0, |last| last + 1);
    assert_eq!(layout.reach(), reach as u64);
    let strided: Vec<T> = numbered(reach);
    let (from, mut to) =
        (bench.guarded(&strided, shift), bench.guarded(&vec![strided_zero::<T>(); places.len()], shift / 2));
    bench.kernels.gather(&bench.stream, &from.part, &layout, &mut to.part).unwrap();
    let should: Vec<T> = places.iter().map(|&at| strided[at]).collect();
    assert_agree(&bench.between(&to), &should, |_| false);
    if !layout.is_distinct() {
        return;
    }
    let mut back = bench.guarded(&vec![strided_zero::<T>(); reach], shift);
    bench.kernels.scatter(&bench.stream, &to.part, &mut back.part, &layout).unwrap();
    let mut should = vec![strided_zero::<T>(); reach];
    places.iter().for_each(|&at| should[at] = strided[at]);
    assert_agree(&bench.between(&back), &should, |_| false);
}

fn strided_zero<T: Plain>() -> T {
    T::of(&vec![0; size_of::<T>()])
}

/// Extents, and strides with some gaps in any order of dimensions, or arbitrary strides.
fn layouts() -> impl Strategy<Value = (Vec<u64>, Vec<u64>)> {
    let distinct = proptest::collection::vec((0u64..9, 0u64..4), 0..=4).prop_flat_map(|dimensions| {
        let mut stride = 1;
        let both: Vec<(u64, u64)> = dimensions
            .into_iter()
            .map(|(extent, gap)| {
                let own = stride + gap;
                stride = own * extent.max(1);
                (extent, own)
            })
            .collect();
        Just(both).prop_shuffle().prop_map(|both| both.into_iter().unzip())
    });
    let any = proptest::collection::vec((0u64..6, 0u64..20), 0..=4).prop_map(|both| both.into_iter().unzip());
    prop_oneof![3 => distinct, 1 => any]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn elements_go_where_layouts_say((extents, strides) in layouts(), shift in 0u64..8) {
        let bench = Bench::new();
        check_strided::<u8>(&bench, &extents, &strides, shift);
        check_strided::<f16>(&bench, &extents, &strides, shift);
        check_strided::<i32>(&bench, &extents, &strides, shift);
        check_strided::<i64>(&bench, &extents, &strides, shift);
    }

    #[test]
    fn distinct_layouts_have_no_place_twice((extents, strides) in layouts()) {
        let layout = Strided::new(&extents, &strides).unwrap();
        let mut all = places(&extents, &strides);
        all.sort_unstable();
        let twice = all.windows(2).any(|pair| pair[0] == pair[1]);
        prop_assert!(!(layout.is_distinct() && twice), "{:?}", layout);
        let dimensions = || extents.iter().copied().zip(strides.iter().copied());
        prop_assert!(!(Strided::are_distinct(dimensions()) && twice), "{:?} in any order", layout);
        prop_assert!(layout.is_distinct() || !Strided::are_distinct(dimensions()), "{:?} by rising stride", layout);
    }
}

#[test]
fn long_rows_and_many_tiles() {
    let bench = Bench::new();
    check_strided::<f32>(&bench, &[2, 70_001], &[70_010, 1], 0);
    check_strided::<f32>(&bench, &[70_001, 2], &[2, 1], 1);
}

#[test]
fn layouts_that_overflow_are_refused() {
    assert_eq!(Strided::new(&[u64::MAX, 2], &[1, 1]), None);
    assert_eq!(Strided::new(&[3], &[u64::MAX / 2 + 1]), None);
    assert_eq!(Strided::new(&[1, 1], &[1]), None);
    let scalar = Strided::new(&[], &[]).unwrap();
    assert_eq!((scalar.len(), scalar.reach(), scalar.is_distinct()), (1, 1, true));
    assert!(!Strided::new(&[2], &[0]).unwrap().is_distinct());
    assert!(!Strided::new(&[2, 3], &[2, 1]).unwrap().is_distinct());
    assert!(Strided::are_distinct([(u64::MAX, 1), (2, u64::MAX)]));
    assert!(!Strided::are_distinct([(u64::MAX, 2), (2, u64::MAX)]), "reaches beyond what can be counted");
}
