"""Gold answers with the right and the wrong answers to each: written before the rules, and not used to make them."""

# ruff: noqa: RUF001

from __future__ import annotations

PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # braces that carry meaning
    "3^{k+2}": ((r"9\cdot 3^k", "3^{2+k}", "3^{k + 2}"), ("3^k+2", "3^{k}+2", "3^k2", "3^{k2}")),
    r"\sqrt{2y-5}": (("(2y-5)^{0.5}", r"\sqrt{-5+2y}"), (r"\sqrt{2y}-5", r"\sqrt{2}y-5", r"\sqrt2y-5")),
    r"\frac{7}{12}": (("7/12", r"\tfrac{7}{12}", r"\frac7{12}", r"\frac{14}{24}"), (r"\frac{71}{2}", r"\frac71 2", r"\frac{7}{1}2", "12/7")),
    "10^{-3}": (("0.001", "1/1000", "1e-3"), ("10^-3 + 1", "10-3", "10^{-}3", "10^{3}", "-30")),
    r"0.2\overline{34}": ((r"0.2\overline{3434}", "232/990", "116/495"), (r"0.\overline{234}", r"0.23\overline{4}", "0.234")),
    r"\binom{n}{k+1}": ((r"\dbinom{n}{k+1}", r"\binom{n}{1+k}"), (r"\binom{n}{k}+1", r"\binom{n}{k}", r"\binom{k+1}{n}", r"\frac{n}{k+1}")),
    r"\log_{10}(50)": ((r"\log_{10} 50", r"1+\log_{10} 5"), (r"\log_1 050", r"\log_{1}{0(50)}", r"\log_5 10", "50")),
    "x_{12}": (("x_{12}", "x_{ 12 }"), ("x_1 2", "x_{1}2", "x^{12}", "x_{21}", "12x")),
    "(a-b)^{2k}": ((r"(-b+a)^{2k}",), ("(a-b)^2k", "(a-b)^{2}k", "a-b^{2k}")),
    r"\frac{x}{x+1}": (("x/(x+1)", r"1-\frac{1}{x+1}"), (r"\frac{x}{x}+1", "x/x+1", r"\frac{x+1}{x}")),
    r"\sqrt{3}x": ((r"x\sqrt{3}", r"\sqrt3 x", r"\sqrt{3}\cdot x"), (r"\sqrt{3x}", r"\sqrt[3]{x}", "3x")),
    r"\sqrt[4]{16x}": ((r"2\sqrt[4]{x}", r"(16x)^{1/4}"), (r"4\sqrt{16x}", r"\sqrt[4]{16}x", r"\sqrt{416x}")),
    r"\frac{3}{4}\pi r^{3}": ((r"\frac{3\pi r^3}{4}", r"0.75\pi r^3"), (r"\frac{4}{3}\pi r^3", r"\frac34\pi r3", r"\frac{3}{4\pi r^3}")),
    r"e^{-x^2}": ((r"\frac{1}{e^{x^2}}", r"\exp(-x^2)"), ("e^{-x}2", "e^{-2x}", "(e^{-x})^2", "-e^{x^2}")),
    "g(2x)": (("g(2 x)", "g(x+x)"), ("2g(x)", "g(2)x", "g2x")),
    r"3^{3^2}": (("3^9", "19683"), ("(3^3)^2", "27^2", "3^6")),
    # relations
    "-7": (
        ("= -7", "x=-7", "−7", "-7.00", r"-\frac{14}{2}", r"\boxed{-7}", r"\text{Sum}=-7", r"\therefore x = -7"),
        (
            "< -7", r"\geq -7", r"\neq -7", r"\rightarrow -7", r"\approx -7", r"\propto -7", "7", "--7", "-7!",
            "-7 sevenths", "-7 thirds", "-7 dozen", "-7 million", r"-7\ldots", "-7...", "-7 perhaps", "-7 or 7",
            "-7 cubed", "x < -7", "-7 not", "not -7", "-7i", r"\pm 7", "7-", "-7_{8}", "-7'",
        ),
    ),
    r"x \le -4": ((r"-4 \ge x", r"(-\infty,-4]", "x<=-4"), ("x < -4", r"x\ge -4", "-4", "x=-4", r"y \le -4")),
    r"0<t<1": (("t \\in (0,1)", "(0,1)", "0 < t < 1"), (r"0 \le t < 1", "t<1", "0<t", "1<t<0", "[0,1]")),
    # primes
    "y''": ((r"y^{\prime\prime}", "y ''"), ("y'", "y", "y^2", "y'''")),
    "g'(2)": ((r"g^{\prime}(2)",), ("g(2)", "g''(2)", "2g'", "g'(3)")),
    # named pairs
    "(5,7)": (
        ("x=5, y=7", r"x=5,\; y=7", "(x,y) = (5,7)", "y=7, x=5", r"\left(5, 7\right)"),
        ("x=7, y=5", "y=5, x=7", "(7,5)", "(y,x)=(5,7)", "57", "5.7"),
    ),
    "(1,2,3)": (("x=1,y=2,z=3", "z=3, x=1, y=2", "(x,y,z)=(1,2,3)"), ("x=3,y=2,z=1", "z=1,y=2,x=3", r"(1,2)", "(x,z,y)=(1,2,3)")),
    "p=2, q=-3": (("q=-3, p=2", r"p = 2 \text{ and } q = -3"), ("p=-3, q=2", "q=2, p=-3", "p=2", "p=2, q=3")),
    # bases
    "101_2": (("101_{2}", "5", "5_{10}", r"101_{\text{two}}"), ("101_3", "5_2", "111_2")),
    "25": (("11001_2", "25_{10}", r"31_8"), ("11001", "25_8", "25_{16}", "25_x")),
    "B_6": (("B_6", "B_{6}"), ("B", "11", "B_5", "b_6", "6B")),
    "321_4": (("321_{4}", "57"), ("321_5", "123_4")),
    # units and number words
    "3/4": (("0.75", "75%", "3 quarters", r"\frac{3}{4}"), ("3", "4/3", "0.34", "34", "3 fourths of 4")),
    "8": (
        ("8 cm", r"8\text{ inches}", "8 ways", "8 students", r"8\text{ units}", r"\$8", "8.0", r"8\,", r"\;8"),
        (
            "8 ninths", "8 tenths", "8 hundredths", "8 pairs of 2", "8 times 2", "8 choose 3", "8 mod 3", "8 score", "8 gross",
            "8 trillion", "8 or 9", "8 and 1/2", "8 and a half", "8ish", "around 8", "roughly 8", "8 minus", "8 to 10", "8-10",
            "8 over 3", "8 sixteenths", "8 pi", r"8\text{ thousand}", "8x", "8_9", "8!", r"8^\prime", "8?", r"\not 8",
        ),
    ),
    r"2\pi": ((r"\pi\cdot 2", r"2\pi\text{ radians}"), (r"2\pi\text{ thirds}", r"2\pi\text{ sixths}", r"\pi^2", "6.28")),
    "3.5 km": (("3500 m", "3.5", r"3.5\text{ km}", "3.5 kilometers"), ("3.5 m", "35 km", "3.5 km/h", r"3.5\text{ km}^2")),
    "15 seconds": (("15", "15 s", "0.25 minutes", r"15\text{ sec}"), ("15 minutes", "15 m", "15 seconds^2", "1/15 seconds")),
    "6 zorbs": (("6", "6 zorbs", r"6\text{ zorbs}"), ("6 blips", "6 zorbs and 1", "7 zorbs", "6 zorbs squared")),
    "9.8 m/s^2": (("9.8", r"9.8\text{ m/s}^2", r"9.8\,\mathrm{m/s^2}"), ("9.8 m/s", "9.8 m", "98 m/s^2")),
    r"120^\circ": (("120", "120°", "120 degrees", r"m\angle B = 120^\circ"), ("120 rad", r"12^\circ", r"120\pi", "120'")),
    # transposes, letters, indices
    "B": (
        ("(B)", r"\text{B}", "B. 7", "(B) 7", r"\text{(B) 7}", r"\mathbf{B}", "**B**", "B)"),
        ("B^T", "B^{-1}", "b", "B_2", "B'", "B, C", "(B) and (C)", "B or C", "3B", r"\bar{B}", "(C) B", "BB", "8"),
    ),
    "M^{-1}": (("M^{-1}", r"M^{ -1 }"), ("M", "M^T", "M-1", "M^{1}", "-M")),
    "N": (("N", r"\text{N}"), ("n", "N_0", "NN", "M", "N'")),
    "k": (("k", "{k}", "k^1"), ("K", "k_0", "2k", "kk", "k'", r"\hat{k}", "-k")),
    "x_1x_2": (("x_2x_1", r"x_1 \cdot x_2", "x_{1}x_{2}"), ("x_1x_1", "x_{12}", "x_1+x_2", "xx")),
    "pq": (("qp", r"p \cdot q", "p q"), ("PQ", "p+q", "p", "p/q")),
    "xyz": (("zyx", "x y z", r"z \cdot x \cdot y"), ("xy", "xyzz", "x+y+z", "XYZ")),
    "PQR": (("PQR", r"\text{PQR}"), ("PQ", "PRS")),
    # intervals
    r"(-\infty, 5)": ((r"x<5", r"(-\infty,5)", r"5>x", r"(- \infty, 5)"), (r"[-\infty,5)", r"(-\infty,5]", r"(5,\infty)", "5", r"x \le 5")),
    "[-2,2]": ((r"-2 \le x \le 2", r"|x| \le 2", r"\left[-2, 2\right]"), ("(-2,2)", "[-2,2)", "[2,-2]", r"\pm 2", r"\{-2,2\}")),
    r"(1,3)\cup(3,5)": ((r"(3,5)\cup(1,3)", r"(1,3) \cup (3,5)"), ("(1,5)", r"(1,3)\cap(3,5)", r"[1,3)\cup(3,5)", "(1,3),(3,5)")),
    r"(-\infty,0)\cup(0,\infty)": ((r"x \neq 0", r"\mathbb{R}\setminus\{0\}"), (r"(-\infty,\infty)", r"\mathbb{R}", "0", r"x = 0")),
    # thousands
    "10,500": (("10500", r"10{,}500", r"10\,500", r"10,\!500", "10500.0"), ("10, 500", "10.5", "105,00", "1,0500", "10,5")),
    "2500000": (("2,500,000", "2.5 million", r"2.5\times10^6", "2 500 000"), ("2.5", "2,500", "2,50,0000", "2, 500, 000", "25 million")),
    "(2,500)": (("(2, 500)",), ("2500", "(2500)", "(500,2)")),
    # complex numbers
    "1": ((r"e^{2\pi i}", "i^4", r"-i^2", r"\sin 90^\circ", r"\tan 45^\circ", "0!", r"\frac{5}{5}"), ("e^{i}", "i", "-1", "1i", r"\sin 90", r"e^{\pi i}")),
    "-i": ((r"e^{-i\pi/2}", r"\frac{1}{i}", "i^3", r"0-i"), ("i", "-1", "1", "-j-1")),
    r"3i\sqrt{2}": ((r"\sqrt{-18}", r"3\sqrt{2}i", r"3\sqrt{2}\,\mathrm{i}"), (r"3\sqrt{2}", r"-3i\sqrt2", r"\sqrt{18}", r"3\sqrt{2i}")),
    "2-5i": (("-5i+2", r"2-5\mathrm{i}"), ("2+5i", "5-2i", "-3i", "(2,-5)")),
    r"\sqrt{2}e^{i\pi/4}": (("1+i", r"\sqrt2(\cos 45^\circ + i\sin 45^\circ)"), ("1-i", r"\sqrt{2e^{i\pi/4}}", r"\sqrt2")),
    # choices
    "B, C": (("B,C", r"\text{B, C}", r"\text{B,C}", "B and C", "C, B", "(B), (C)"), ("B", "C", "B, C, D", "A, C", "B or C or D")),
    "D": (("(D) 45", "D. 45", "D) 45", r"\textbf{(D) } 45", "D: 45", r"(D)\ \frac12"), ("(E) 45", "45", "d", "D, E", "D or E", "not D", "(A) D")),
    # repeating decimals
    "2/9": ((r"0.\bar{2}", r"0.\bar2", r"0.\overline{2}", "0.222...", r"0.222\ldots", r"0.\dot2"), ("0.2", "0.222", r"0.\bar{3}", r"\bar{0.2}9")),
    r"3.\overline{142857}": (("22/7", r"3.\overline{142857142857}", r"3\frac17"), (r"3.142857", r"3.14\overline{2857}", r"\pi", r"3\overline{142857}")),
    # degrees in functions
    r"\frac{\sqrt{3}}{2}": (
        (r"\sin 60^\circ", r"\cos 30^{\circ}", r"\sin\left(60^\circ\right)", r"\sin\frac{\pi}{3}", r"\sqrt{3}/2", r"\frac{\sqrt3}2"),
        (r"\sin 60", r"\cos 60^\circ", r"\frac{\sqrt{3}}{2}^\circ\text{ or }1", r"\sqrt{\frac{3}{2}}", r"\frac{3}{\sqrt2}", "0.866"),
    ),
    # labelled answers
    "36": ((r"\text{Perimeter}=36", r"\text{Perimeter} = 36", r"AB = 36", "P = 36", r"\angle P=36^\circ", r"36.\,"), ("36 = 6x", "x^2 = 36", "2x=36", r"\text{Perimeter} < 36")),
    r"\{x \mid -1<x<4\}": (("(-1,4)", "-1<x<4", r"\{x : -1 < x < 4\}", r"\{ x \mid -1 < x < 4 \}"), ("[-1,4]", r"\{-1,4\}", r"\{x \mid -1 < x\}", "(4,-1)")),
    r"\{x \mid x \ge 2\}": ((r"[2,\infty)", r"x \geq 2", r"\{x:x\ge 2\}"), (r"(2,\infty)", r"\{x\mid x>2\}", r"\{2\}")),
    # mixed numbers, percent, currency, scientific
    r"1\frac{2}{3}": (("5/3", r"1\frac23", "1 2/3", r"1\tfrac{2}{3}", r"1.\overline{6}"), ("12/3", r"1\cdot\frac23", "1.67", "2/3", "-1 2/3")),
    r"12.5\%": (("0.125", "1/8", "12.5%", "12.5"), ("1.25", "125%", "0.0125", "12%")),
    r"\$45": (("45", "45 dollars", r"\$45.00", "$45$"), ("45 euros", "£45", "45 cents", r"\$450")),
    r"3.2\times 10^{-5}": (("0.000032", "3.2e-5", r"32\cdot 10^{-6}", r"3.2 \times 10^{-5}"), (r"3.2\times 10^{5}", r"3.2\times10-5", r"3.2\times 10^{-6}", "3.2")),
    # sets, tuples, matrices
    r"\{-1,4\}": (("-1,4", r"\{4,-1\}", "x=-1, x=4", r"-1 \text{ and } 4", "4, -1", r"x = -1 \text{ or } x = 4"), ("-1", "4", "(4,-1)", r"\{1,4\}", r"\{-1,4,5\}")),
    r"(2,4),(4,2)": (("(4,2),(2,4)", r"\{(2,4),(4,2)\}", r"(2,4) \text{ and } (4,2)"), ("(2,4)", "(4,2)", "(2,2),(4,4)", "2,4,4,2")),
    "2,4,6": (("2, 4, 6", r"\{2,4,6\}"), (r"2,4,6,\ldots", "2,4,6...", "246", "2,4", "2+4+6")),
    r"1+2+\cdots+n": ((r"1+2+\dots+n", r"1 + 2 + \cdots + n"), ("1+2+n", r"1+2+\cdots+m", "n")),
    r"\begin{bmatrix}0&-1\\1&0\end{bmatrix}": (
        (r"\begin{pmatrix}0 & -1\\ 1 & 0\end{pmatrix}", r"\left[\begin{array}{cc}0&-1\\1&0\end{array}\right]"),
        (r"\begin{bmatrix}0&1\\-1&0\end{bmatrix}", r"\begin{bmatrix}0&-1\\1&0\end{bmatrix}^T", r"\begin{bmatrix}0&-1\\1&1\end{bmatrix}", "1"),
    ),
    r"\begin{pmatrix}1&2&3\end{pmatrix}": ((r"\begin{bmatrix} 1 & 2 & 3 \end{bmatrix}",), (r"\begin{pmatrix}1\\2\\3\end{pmatrix}", r"\begin{pmatrix}3&2&1\end{pmatrix}", "123")),
    # formulas
    r"-\cos x + C": ((r"C-\cos x", r"-\cos(x)+C"), (r"-\cos x", r"\cos x + C", r"-\cos(x+C)", r"-\cos x + 1")),
    "y=-3x": (("y = -3x", "-3x", "3x+y=0"), ("y=3x", "x=-3y", "y<-3x", "-3")),
    "2x+3y=12": (("3y+2x=12", "4x+6y=24", r"y=4-\frac23x"), ("2x+3y=6", "3x+2y=12", "12", "2x+3y", "2x-3y=12")),
    r"\tan\theta": ((r"\frac{\sin\theta}{\cos\theta}", r"\tan(\theta)"), (r"\cot\theta", r"\tan\phi", r"\tan^{-1}\theta", r"\theta")),
    r"\frac{1}{\sqrt{5}}": ((r"\frac{\sqrt5}{5}", "5^{-1/2}", r"\sqrt{\frac15}"), (r"\sqrt{5}", r"\frac{1}{5}", "0.4472")),
    r"x^2-4": (("(x-2)(x+2)", "x^2 - 2^2", "-4+x^2"), ("(x-2)^2", "x^2+4", "x-4", "X^2-4")),
    r"2^{10}-1": (("1023", "1024-1"), ("2^{10-1}", "2^9", "1024", "2^{10}-2")),
    r"\frac{n!}{k!}": ((r"n!/k!", r"\frac{n!}{k!}"), (r"\frac{n}{k}", r"(n/k)!", r"\frac{k!}{n!}", "n!k!")),
    r"\lceil y\rceil": ((r"\left\lceil y \right\rceil",), (r"\lfloor y\rfloor", "y")),
    "5:7": (("5 : 7", "10:14"), ("7:5", "57", "5,7", "5:7:9")),
    r"\mathbb{Z}": ((r"\mathbb Z",), (r"\mathbb{Q}", r"\mathbb{Z}^+")),
    r"\log_2 5": ((r"\frac{\ln 5}{\ln 2}", r"\log_{2}5", r"\log_2(5)"), (r"\log_5 2", r"\log 25", r"\log_{25}", "2.32")),
    # words
    "Tuesday": (("tuesday", r"\text{Tuesday}", "Tuesday."), ("Thursday", "Tue or Wed", "not Tuesday", "Tuesdays and Fridays")),
    "yes": (("Yes", r"\text{Yes}"), ("no", "yes and no", "not yes")),
    r"\text{infinitely many}": (("infinitely many", "Infinitely many"), ("finitely many", "many", r"\infty - 1")),
}
