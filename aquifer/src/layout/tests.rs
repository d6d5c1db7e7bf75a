//! Layouts and views against a list of places.

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::*;

/// A layout as the list of its elements' places, in row-major order of the indices.
#[derive(Clone, Debug, PartialEq)]
struct Model {
    shape: Vec<usize>,
    places: Vec<usize>,
}

impl Model {
    fn row_major(shape: &[usize]) -> Model {
        Model { shape: shape.to_vec(), places: (0..shape.iter().product()).collect() }
    }

    /// Another shape, with the element that `from` names at each index.
    fn pick(&self, shape: Vec<usize>, from: impl Fn(&[usize]) -> Vec<usize>) -> Model {
        let places = indices(&shape).map(|index| self.at(&from(&index))).collect();
        Model { shape, places }
    }

    fn at(&self, index: &[usize]) -> usize {
        let flat = index.iter().zip(&self.shape).fold(0, |flat, (index, extent)| flat * extent + index);
        self.places[flat]
    }
}

/// All indices of a shape, in row-major order.
fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + use<> {
    let shape = shape.to_vec();
    (0..shape.iter().product::<usize>()).map(move |mut flat| {
        let mut index = vec![0; shape.len()];
        for (at, extent) in shape.iter().enumerate().rev() {
            index[at] = flat % extent;
            flat /= extent;
        }
        index
    })
}

fn places(layout: &Layout) -> Vec<usize> {
    indices(layout.shape()).map(|index| layout.place(&index).unwrap()).collect()
}

#[derive(Clone, Debug)]
enum View {
    Narrow(usize, usize, usize),
    Select(usize, usize),
    Transpose(usize, usize),
    Squeeze(usize),
    Unsqueeze(usize),
    Broadcast(Vec<usize>),
    Reshape(usize),
}

fn view() -> impl Strategy<Value = View> {
    prop_oneof![
        3 => (0usize..6, 0usize..6, 0usize..6).prop_map(|(dimension, start, end)| View::Narrow(dimension, start, end)),
        1 => (0usize..6, 0usize..6).prop_map(|(dimension, index)| View::Select(dimension, index)),
        3 => (0usize..6, 0usize..6).prop_map(|(a, b)| View::Transpose(a, b)),
        1 => (0usize..6).prop_map(View::Squeeze),
        1 => (0usize..6).prop_map(View::Unsqueeze),
        1 => prop::collection::vec(1usize..4, 0..3).prop_map(View::Broadcast),
        2 => (0usize..6).prop_map(View::Reshape),
    ]
}

/// Applies a view to both, and checks that it is refused only where it must be.
fn apply(view: &View, layout: Layout, model: Model) -> Result<(Layout, Model), TestCaseError> {
    let shape = model.shape.clone();
    let extent = |dimension: usize| shape.get(dimension).copied();
    let refused = |result: Result<Layout, LayoutError>| {
        prop_assert!(result.is_err(), "{view:?} of {layout:?} gave {result:?}");
        Ok((layout, model.clone()))
    };
    match *view {
        View::Narrow(dimension, start, end) => {
            let narrowed = layout.narrow(dimension, start..end);
            if extent(dimension).is_none_or(|extent| start > end || end > extent) {
                return refused(narrowed);
            }
            let mut to = shape.clone();
            to[dimension] = end - start;
            let picked = model.pick(to, |index| {
                let mut index = index.to_vec();
                index[dimension] += start;
                index
            });
            Ok((narrowed?, picked))
        }
        View::Select(dimension, index) => {
            let selected = layout.select(dimension, index);
            if extent(dimension).is_none_or(|extent| index >= extent) {
                return refused(selected);
            }
            let mut to = shape.clone();
            to.remove(dimension);
            let picked = model.pick(to, |rest| {
                let mut full = rest.to_vec();
                full.insert(dimension, index);
                full
            });
            Ok((selected?, picked))
        }
        View::Transpose(a, b) => {
            let transposed = layout.transpose(a, b);
            if a.max(b) >= shape.len() {
                return refused(transposed);
            }
            let mut to = shape.clone();
            to.swap(a, b);
            let picked = model.pick(to, |index| {
                let mut index = index.to_vec();
                index.swap(a, b);
                index
            });
            Ok((transposed?, picked))
        }
        View::Squeeze(dimension) => {
            let squeezed = layout.squeeze(dimension);
            if extent(dimension) != Some(1) {
                return refused(squeezed);
            }
            let mut to = shape.clone();
            to.remove(dimension);
            Ok((squeezed?, Model { shape: to, ..model }))
        }
        View::Unsqueeze(dimension) => {
            let unsqueezed = layout.unsqueeze(dimension);
            if dimension > shape.len() || shape.len() == MAX_DIMENSIONS {
                return refused(unsqueezed);
            }
            let mut to = shape.clone();
            to.insert(dimension, 1);
            Ok((unsqueezed?, Model { shape: to, ..model }))
        }
        View::Broadcast(ref outer) => {
            let mut to = outer.clone();
            to.extend(shape.iter().map(|&extent| if extent == 1 { 2 } else { extent }));
            let broadcast = layout.broadcast(&to);
            if to.len() > MAX_DIMENSIONS {
                return refused(broadcast);
            }
            let added = outer.len();
            let picked = model.pick(to, |index| {
                index[added..].iter().zip(&shape).map(|(&index, &extent)| if extent == 1 { 0 } else { index }).collect()
            });
            Ok((broadcast?, picked))
        }
        View::Reshape(split) => {
            // All in one, or two halves.
            let len = layout.len();
            let to = if len.is_multiple_of(2) && split.is_multiple_of(2) { vec![2, len / 2] } else { vec![len] };
            match layout.reshape(&to) {
                Ok(reshaped) => Ok((reshaped, Model { shape: to, ..model })),
                Err(error) => {
                    prop_assert!(!layout.is_contiguous(), "{error}");
                    // No strides serve: the steps between places differ.
                    let steps: Vec<_> = model.places.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
                    prop_assert!(to.len() > 1 || steps.windows(2).any(|pair| pair[0] != pair[1]), "{error}");
                    Ok((layout, model))
                }
            }
        }
    }
}

fn check(layout: &Layout, model: &Model) -> TestCaseResult {
    prop_assert_eq!(layout.shape(), &model.shape[..]);
    prop_assert_eq!(&places(layout), &model.places);
    prop_assert_eq!(layout.len(), model.places.len());
    prop_assert_eq!(layout.end(), model.places.iter().max().map_or(0, |last| last + 1));
    let dense = model.places.windows(2).all(|pair| pair[1] == pair[0] + 1);
    prop_assert_eq!(layout.is_contiguous(), dense, "{:?}", layout);
    prop_assert_eq!(places(&layout.merged()), places(layout));
    prop_assert!(layout.merged().rank() <= layout.rank().max(1));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn views_agree_with_a_list_of_places(
        shape in prop::collection::vec(0usize..5, 0..5), column in any::<bool>(), views in prop::collection::vec(view(), 0..6),
    ) {
        let (mut layout, mut model) = (Layout::row_major(&shape)?, Model::row_major(&shape));
        if column {
            let reversed: Vec<usize> = (0..shape.len()).rev().collect();
            let other_way: Vec<usize> = shape.iter().rev().copied().collect();
            layout = Layout::row_major(&other_way)?.permute(&reversed)?;
            model = Model::row_major(&other_way).pick(shape, |index| index.iter().rev().copied().collect());
        }
        check(&layout, &model)?;
        for view in &views {
            (layout, model) = apply(view, layout, model)?;
            check(&layout, &model)?;
        }
    }

    #[test]
    fn layouts_do_not_overflow(
        shape in prop::collection::vec(any::<usize>(), 0..10), strides in prop::collection::vec(any::<usize>(), 0..10),
        offset in any::<usize>(),
    ) {
        let layouts = [Layout::row_major(&shape), Layout::strided(&shape, &strides, offset)];
        for layout in layouts.into_iter().flatten() {
            let _ = (layout.len(), layout.span(), layout.end(), layout.merged(), layout.is_contiguous());
            let _ = (layout.reshape(&[layout.len()]), layout.unsqueeze(0), layout.broadcast(&shape));
        }
    }
}

#[test]
fn scalars_and_empty_layouts_are_valid() {
    let scalar = Layout::row_major(&[]).unwrap();
    assert_eq!((scalar.len(), scalar.end(), scalar.place(&[])), (1, 1, Some(0)));
    assert!(scalar.is_contiguous());
    assert_eq!(scalar.unsqueeze(0).unwrap().broadcast(&[4]).unwrap().strides(), [0]);
    let empty = Layout::row_major(&[3, 0, 5]).unwrap();
    assert_eq!((empty.len(), empty.span(), empty.end()), (0, 0, 0));
    assert!(empty.is_contiguous() && empty.reshape(&[0, 7]).is_ok() && empty.reshape(&[1]).is_err());
}

#[test]
fn errors_of_layouts_name_the_shapes() {
    let matrix = Layout::row_major(&[2, 3]).unwrap();
    let cases = [
        (Layout::row_major(&[1; 9]), "has 9 dimensions, 8 is the most"),
        (Layout::row_major(&[1 << 33, 1 << 33]), "[8589934592, 8589934592] has more elements"),
        (Layout::strided(&[2, 3], &[1], 0), "1 strides, [1], were given for the 2 dimensions of [2, 3]"),
        (matrix.narrow(2, 0..1), "[2, 3] has no dimension 2, only dimensions 0 to 1"),
        (matrix.narrow(1, 2..5), "indices 2..5 are not a part of dimension 1 of [2, 3]"),
        (matrix.select(0, usize::MAX), "are not a part of dimension 0 of [2, 3]"),
        (matrix.permute(&[0, 0]), "[0, 0] does not name each dimension of [2, 3] once"),
        (matrix.squeeze(0), "cannot squeeze dimension 0 of [2, 3]"),
        (matrix.reshape(&[4, 2]), "[2, 3] cannot become [4, 2], which has another number of elements"),
        (
            matrix.transpose(0, 1).and_then(|m| m.reshape(&[6])),
            "[3, 2] with strides [1, 3] cannot become [6] without a copy",
        ),
        (matrix.broadcast(&[3, 3]), "[2, 3] cannot be expanded to [3, 3]"),
        (matrix.broadcast(&[3]), "[2, 3] cannot be expanded to [3]"),
    ];
    for (result, expected) in cases {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(expected), "{text:?} does not say {expected:?}");
    }
}
